"""Codes of any width as 32-bit words, and back: one string of bits a row, the lowest bit first, no gaps.

The layout is that of compressed-tensors. Its own functions would do, but importing them imports transformers:
two seconds and 200 MB, at every opening of a quantized checkpoint.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def pack_to_int32(codes: Tensor, num_bits: int, packed_dim: int = 1) -> Tensor:
    """Signed codes [R, C] int8 of `num_bits` bits as words [R, ceil(C * num_bits / 32)] int32, or along 0.

    They are stored as unsigned numbers, 2^(num_bits - 1) more.
    """
    rows = codes if packed_dim == 1 else codes.T
    shifted = (rows.cpu().to(torch.int16) + (1 << (num_bits - 1))).to(torch.uint8).numpy()
    stored = _join(shifted, num_bits)
    stored = np.pad(stored, ((0, 0), (0, -stored.shape[1] % 4)))
    words = torch.from_numpy(np.ascontiguousarray(stored).view("<i4"))
    return (words if packed_dim == 1 else words.T).contiguous()


def unpack_from_int32(words: Tensor, num_bits: int, shape: torch.Size, packed_dim: int = 1) -> Tensor:
    """The signed codes `shape` int8 that `pack_to_int32` made `words` of."""
    rows = words if packed_dim == 1 else words.T
    stored = rows.cpu().contiguous().numpy().astype("<i4", copy=False).view(np.uint8)
    shifted = _split(stored, num_bits, shape[packed_dim])
    codes = torch.from_numpy((shifted - np.uint8(1 << (num_bits - 1))).view(np.int8))
    return codes if packed_dim == 1 else codes.T


def _join(codes: NDArray[np.uint8], num_bits: int) -> NDArray[np.uint8]:
    """Unsigned codes [R, C] as bytes."""
    if num_bits == 8:
        return codes
    if num_bits == 4:
        even = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
        return np.asarray(even[:, ::2] | (even[:, 1::2] << 4), np.uint8)
    bits = np.unpackbits(codes[..., None], axis=-1, count=num_bits, bitorder="little")
    return np.packbits(bits.reshape(len(codes), -1), axis=-1, bitorder="little")


def _split(stored: NDArray[np.uint8], num_bits: int, count: int) -> NDArray[np.uint8]:
    """Bytes as unsigned codes [R, count]."""
    if num_bits == 8:
        return stored[:, :count]
    if num_bits == 4:
        return np.stack((stored & 15, stored >> 4), -1).reshape(len(stored), -1)[:, :count]
    bits = np.unpackbits(stored, axis=1, count=count * num_bits, bitorder="little")
    return np.packbits(bits.reshape(len(stored), count, num_bits), axis=-1, bitorder="little")[..., 0]
