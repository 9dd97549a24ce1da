"""Codes as the bytes that graph formats store."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.compile.code_products import stored_bits
from qtool.core.qtensor import Fp4Tensor, QuantizedTensor
from qtool.core.schemes import IntScheme


def code_bytes(codes: torch.Tensor, weight: QuantizedTensor) -> tuple[NDArray[np.uint8], bool]:
    """Codes or zero points of `weight` as row-major bytes, and whether they are signed.

    Symmetric codes stay signed, others are shifted to unsigned, zero to the middle of the stored range. Those
    of up to 4 bits lie two a byte, the first in the low nibble.
    """
    signed, bits = weight.zero_point is None, stored_bits(weight.scheme)
    shifted = codes if signed else codes.to(torch.int16) + (1 << (bits - 1))
    values = shifted.to(torch.uint8).contiguous().numpy().reshape(-1)
    return pack4(values) if bits == 4 else values, signed


def pack4(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The low four bits of each, two a byte, the first in the low nibble."""
    flat = np.append(values, np.zeros(len(values) % 2, np.uint8)) & 0x0F
    return np.asarray(flat[0::2] | (flat[1::2] << 4), dtype=np.uint8)


def as_int8(weight: Fp4Tensor) -> QuantizedTensor:
    """The same numbers as 8-bit integers: twice what an e2m1 code stands for is whole, 12 at most."""
    scheme = IntScheme(8, weight.scheme.group_size, symmetric=True)
    return QuantizedTensor((2 * weight.values()).to(torch.int8), weight.scales() / 2, None, scheme)


def as_int4_pairs(weight: Fp4Tensor) -> QuantizedTensor:
    """The same numbers as the sum of two 4-bit integers: [N, 2K], to be multiplied by the inputs twice.

    Twice what an e2m1 code stands for is whole: 12 at most, so the sum of two numbers of up to 7.
    """
    whole = as_int8(weight)
    first = whole.codes.clamp(-7, 7)
    return replace(
        whole,
        codes=torch.cat([first, whole.codes - first], 1),
        scale=whole.scale.repeat(1, 2),
        scheme=replace(whole.scheme, num_bits=4),
    )
