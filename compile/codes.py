"""Integer codes as the bytes that graph formats store."""

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.core.qtensor import QuantizedTensor


def code_bytes(codes: torch.Tensor, weight: QuantizedTensor) -> tuple[NDArray[np.uint8], bool]:
    """Codes or zero points of `weight` as row-major bytes, and whether they are signed.

    Symmetric codes stay signed, others are shifted to unsigned. 4-bit ones lie two a byte, the first in the
    low nibble.
    """
    signed = weight.zero_point is None
    shifted = codes if signed else codes.to(torch.int16) - weight.scheme.low
    values = shifted.to(torch.uint8).contiguous().numpy().reshape(-1)
    return _pack4(values) if weight.scheme.num_bits == 4 else values, signed


def _pack4(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    flat = np.append(values, np.zeros(len(values) % 2, np.uint8)) & 0x0F
    return np.asarray(flat[0::2] | (flat[1::2] << 4), dtype=np.uint8)
