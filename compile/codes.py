"""Codes as the bytes that graph formats store, and as what kernels multiply."""

import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.core.qtensor import Fp4Tensor, QuantizedTensor
from qtool.core.schemes import NVFP4_ACTIVATIONS, Fp4Scheme, Fp8Scheme, IntScheme, LinearScheme


def stored_bits(scheme: IntScheme) -> int:
    """The bits that a graph stores a code in: graph formats have integers of 4 and of 8."""
    return 4 if scheme.num_bits <= 4 else 8


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


def codes_at_once(scheme: LinearScheme, in_features: int) -> int | None:
    """How many inputs a kernel may sum as codes before it has to apply scales; None: it can't.

    Codes are multiplied by codes of their own kind, int8 or fp8. One scale has to do for all inputs that are
    summed, on both sides.
    """
    weight, activation = scheme.weight, scheme.activation
    if activation is None:
        return None
    if isinstance(weight, Fp8Scheme) and activation.kind == "fp8":
        size = math.gcd(weight.columns or in_features, in_features)
    elif isinstance(weight, IntScheme) and activation.kind == "int8" and stored_bits(weight) == 8:
        size = weight.group_size or in_features
        if size < in_features and not weight.symmetric:
            return None
    else:
        return None
    group = activation.group_size
    if group is None:
        return size
    return None if size % group else group


def multiplies_codes(scheme: LinearScheme) -> bool:
    """Whether some kernels multiply codes: nvfp4 by nvfp4, which have scales of their own way, else where
    `codes_at_once` is a number, for any weight that the scheme's groups and blocks divide."""
    if scheme.activation == NVFP4_ACTIVATIONS:
        return scheme.weight == Fp4Scheme("nvfp4")
    sizes = [size for size in _group_sizes(scheme) if size is not None]
    return codes_at_once(scheme, 2 * math.lcm(*sizes)) is not None


def _group_sizes(scheme: LinearScheme) -> tuple[int | None, ...]:
    weight = scheme.weight
    of_weight = weight.columns if isinstance(weight, Fp8Scheme) else weight.group_size
    return of_weight, None if scheme.activation is None else scheme.activation.group_size
