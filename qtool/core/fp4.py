"""e2m1 floats of four bits: the numbers, the rounding to them, and two of them in a byte."""

import torch
from torch import Tensor

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 stand for; 8 to 15 are the same numbers, negative."""
FP4_MAX = 6.0

_MIDDLES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
"""The middles between neighbours. A tie goes to the even code: up from every second of them."""


def fp4_codes(x: Tensor) -> Tensor:
    """The nearest numbers to float32 ones as codes 0 to 15 (uint8); beyond 6 the largest; ties to even codes.

    What is negative keeps its sign when it rounds to zero, as in the other formats of IEEE 754's kind.
    """
    middles = torch.tensor(_MIDDLES, device=x.device)
    middles[1::2] = torch.nextafter(middles[1::2], torch.zeros_like(middles[1::2]))
    return torch.bucketize(x.abs(), middles, out_int32=True).to(torch.uint8) | ((x < 0).to(torch.uint8) << 3)


def fp4_values(codes: Tensor) -> Tensor:
    """What codes 0 to 15 stand for, float32."""
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=codes.device)
    return table[codes.int()]


def pack_fp4(codes: Tensor) -> Tensor:
    """Codes [N, K] as bytes [N, K / 2], the first of two in the low bits."""
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack_fp4(packed: Tensor) -> Tensor:
    """Bytes [N, K / 2] as codes [N, K], both uint8."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)
