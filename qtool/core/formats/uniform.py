"""Formats that know one integer scheme for a whole checkpoint: what all of its linears can be written as."""

import math
from dataclasses import dataclass, replace

from qtool.core.formats.contract import Contents
from qtool.core.qtensor import QuantizedTensor
from qtool.core.schemes import IntScheme
from qtool.errors import UsageError


@dataclass(frozen=True)
class Uniform:
    """One scheme for all, in the largest groups that divide every linear's: scales are repeated."""

    num_bits: int
    group_size: int | None
    symmetric: bool

    def regroup(self, weight: QuantizedTensor) -> QuantizedTensor:
        """The same weight with a scale for each of the common, smaller groups."""
        if self.group_size is None:
            return weight
        repeats = weight.shape[1] // weight.scale.shape[1] // self.group_size
        zero_point = weight.zero_point
        return replace(
            weight,
            scale=weight.scale.repeat_interleave(repeats, 1),
            zero_point=None if zero_point is None else zero_point.repeat_interleave(repeats, 1),
            scheme=replace(weight.scheme, group_size=self.group_size),
        )


def uniform(name: str, num_bits: tuple[int, ...], contents: Contents) -> Uniform:
    """What every linear can be written as in format `name`, which holds integers of `num_bits`.

    Raises UsageError naming the first linear that keeps it from that.
    """
    if contents.kv_cache is not None:
        raise UsageError(f"{name} knows no quantized KV cache; write it as compressed-tensors")
    weights: dict[str, IntScheme] = {}
    for module, scheme in contents.schemes.items():
        if not isinstance(scheme.weight, IntScheme) or scheme.weight.num_bits not in num_bits:
            bits = " or ".join(map(str, num_bits))
            raise UsageError(f"{module}: is quantized as {scheme}; {name} holds integers of {bits} bits")
        if scheme.activation is not None:
            raise UsageError(f"{module}: has {scheme.activation}; {name} leaves inputs as they are")
        weights[module] = scheme.weight
    first, *others = weights.items()
    for module, weight in others:
        if weight.num_bits != first[1].num_bits:
            raise UsageError(
                f"{module}: has {weight.num_bits} bits and {first[0]} has {first[1].num_bits}; "
                f"{name} holds one number of bits"
            )
    sizes = {weight.group_size for weight in weights.values()}
    group_size = None
    if sizes != {None}:
        group_size = math.gcd(
            *(weight.group_size or contents.shapes[module][1] for module, weight in weights.items())
        )
    return Uniform(first[1].num_bits, group_size, all(weight.symmetric for weight in weights.values()))
