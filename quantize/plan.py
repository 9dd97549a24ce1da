"""Recipe rules → which linear gets which number format and method."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from qtool.core.recipe import Method, Quantization, WeightFormat, matches
from qtool.core.schemes import IntScheme
from qtool.errors import UsageError, nearest

_OFFERED = (32, 48, 64, 80, 96, 128, 160, 192, 256)


@dataclass(frozen=True)
class Assignment:
    """How one linear is quantized."""

    method: Method
    scheme: IntScheme


def assign(quantization: Quantization, linears: Mapping[str, int]) -> dict[str, Assignment]:
    """The assignment of every linear to be quantized, in the model's order.

    `linears` gives each linear's in_features by its full name. ``keep`` wins over every rule, an earlier
    rule over a later one. Raises UsageError naming a pattern that matches no linear, or a linear that no
    group size of its rule divides.
    """
    for rule in quantization.rules:
        for target in rule.targets:
            _check_target(target, quantization.keep, linears)
    assigned = {}
    for module, in_features in linears.items():
        if any(matches(pattern, module) for pattern in quantization.keep):
            continue
        for rule in quantization.rules:
            if any(matches(target, module) for target in rule.targets):
                assigned[module] = Assignment(rule.method, _scheme(module, in_features, rule.weights))
                break
    return assigned


def _check_target(target: str, keep: tuple[str, ...], linears: Mapping[str, int]) -> None:
    matched = [module for module in linears if matches(target, module)]
    if not matched:
        raise UsageError(
            f"quantization.rules: target {target!r} matches no linear of the model; "
            + nearest(target, {re.sub(r"\.\d+\.", ".*.", module) for module in linears})
        )
    if all(any(matches(pattern, module) for pattern in keep) for module in matched):
        raise UsageError(
            f"quantization.rules: target {target!r} matches only linears that quantization.keep holds in "
            f"full precision, such as {matched[0]}; change one of the two"
        )


def _scheme(module: str, in_features: int, weights: WeightFormat) -> IntScheme:
    scheme = weights.scheme(in_features)
    if scheme is None:
        sizes = ", ".join(map(str, (weights.group_size, *weights.group_size_fallback)))
        fitting = ", ".join(str(size) for size in _OFFERED if in_features % size == 0)
        raise UsageError(
            f"quantization.rules: weights.group_size {sizes} does not divide in_features {in_features} of "
            f"{module}; use {fitting or 'null (one group a channel)'}"
        )
    return scheme
