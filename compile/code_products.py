"""Which linears kernels can compute on codes, known from their schemes alone."""

import math

from qtool.core.schemes import NVFP4_ACTIVATIONS, Fp4Scheme, Fp8Scheme, IntScheme, LinearScheme


def stored_bits(scheme: IntScheme) -> int:
    """The bits that a graph stores a code in: graph formats have integers of 4 and of 8."""
    return 4 if scheme.num_bits <= 4 else 8


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
