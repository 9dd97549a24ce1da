"""Recipe rules → which linear gets which number format and method."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from qtool.calibrate.experts import expert_of
from qtool.calibrate.skeleton import HEAD
from qtool.core.recipe import GptqOptions, Method, Quantization, Rtn, matches
from qtool.core.recipe_schemes import WeightFormat
from qtool.core.schemes import ActivationScheme, KvCacheScheme, LinearScheme, WeightScheme
from qtool.errors import UsageError, nearest

_OFFERED = (32, 48, 64, 80, 96, 128, 160, 192, 256)


@dataclass(frozen=True)
class Assignment:
    """How one linear is quantized."""

    method: Method
    scheme: WeightScheme
    activation: ActivationScheme | None = None

    @property
    def computes_with(self) -> LinearScheme:
        """What the linear computes with once it is quantized."""
        return LinearScheme(self.scheme, self.activation)


@dataclass(frozen=True)
class Plan:
    """What becomes of a model: its linears by full name, and its KV cache."""

    assigned: dict[str, Assignment]
    kv_cache: KvCacheScheme | None
    all_experts: bool = False
    """Whether experts are calibrated on every token, not only on those that choose them."""

    @property
    def corrects(self) -> bool:
        """Whether some linear makes up for errors, so that the full-precision model has to run beside."""
        return any(corrects(one.method) for one in self.assigned.values())

    def calibrates(self, part: str) -> bool:
        """Whether the calibration text has to reach a part of the model, such as ``model.layers.0``: where
        neither its keys and values nor a linear of it go by what they see, weights tell everything."""
        within = [one for name, one in self.assigned.items() if f"{name}.".startswith(f"{part}.")]
        return any(map(_calibrates, within)) or (self.kv_cache is not None and part != HEAD)


def _calibrates(one: Assignment) -> bool:
    return (one.activation is not None and one.activation.calibrated) or not isinstance(one.method, Rtn)


def corrects(method: Method) -> bool:
    """Whether a method wants its layer's last linear to make up for the errors before it."""
    return isinstance(method, GptqOptions) and method.correct


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
                scheme = _scheme(module, in_features, rule.weights)
                inputs = None if rule.activations is None else rule.activations.scheme
                _check_method(module, rule.method)
                if inputs is not None and in_features % (inputs.group_size or 1):
                    raise UsageError(
                        f"quantization.rules: activations.group_size {inputs.group_size} does not divide "
                        f"in_features {in_features} of {module}; use null, or a size that does"
                    )
                assigned[module] = Assignment(rule.method, scheme, inputs)
                break
    return assigned


def candidates(quantization: Quantization, linears: Mapping[str, int]) -> dict[str, tuple[WeightScheme, ...]]:
    """The number formats that ``auto`` may choose from for each of its linears, in the model's order.

    Those are linears that neither ``keep`` holds nor a rule matches. `linears` and errors as for `assign`.
    """
    auto = quantization.auto
    if auto is None:
        return {}
    for target in auto.targets:
        _check_target(target, quantization.keep, linears)
    ruled = assign(quantization, linears)
    found = {}
    for module, in_features in linears.items():
        kept = any(matches(pattern, module) for pattern in quantization.keep)
        if kept or module in ruled or not any(matches(target, module) for target in auto.targets):
            continue
        found[module] = tuple(_scheme(module, in_features, weights) for weights in auto.candidates)
        _check_method(module, auto.method)
    if not found:
        raise UsageError("quantization.auto: rules match all of its targets; change one of the two")
    return found


def _check_target(target: str, keep: tuple[str, ...], linears: Mapping[str, int]) -> None:
    matched = [module for module in linears if matches(target, module)]
    if not matched:
        raise UsageError(
            f"quantization: target {target!r} matches no linear of the model; "
            + nearest(target, {re.sub(r"\.\d+\.", ".*.", module) for module in linears})
        )
    if all(any(matches(pattern, module) for pattern in keep) for module in matched):
        raise UsageError(
            f"quantization: target {target!r} matches only linears that quantization.keep holds in "
            f"full precision, such as {matched[0]}; change one of the two"
        )


def _check_method(module: str, method: Method) -> None:
    if corrects(method) and expert_of(module) is not None:
        raise UsageError(
            f"quantization: method {method.name} is to correct, which one linear at the end of a "
            f"layer does, and {module} is one of many; leave correct out there"
        )


def _scheme(module: str, in_features: int, weights: WeightFormat) -> WeightScheme:
    scheme = weights.scheme(in_features)
    if scheme is None:
        sizes = ", ".join(map(str, weights.group_sizes))
        fitting = ", ".join(str(size) for size in _OFFERED if in_features % size == 0)
        fixed = weights.format != "int"
        which = f", which {weights.format} prescribes," if fixed else ""
        raise UsageError(
            f"quantization: weights.group_size {sizes}{which} does not divide in_features "
            f"{in_features} of {module}; use {'format int with ' if fixed else ''}"
            + (fitting or "null (one group a channel)")
        )
    return scheme
