"""Quantize one layer: fold the channel scales that its methods ask for, then each linear by its method."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qtool.calibrate.finite import is_finite
from qtool.calibrate.statistics import InputStatistics
from qtool.core.formats import compressed_tensors
from qtool.core.manifest import LinearRecord
from qtool.core.recipe import GptqOptions, Rtn
from qtool.core.schemes import Fp4Scheme, Fp8Scheme, IntScheme
from qtool.errors import QtoolError
from qtool.quantize.activations import calibrated
from qtool.quantize.correction import OutputError, closing_linear, corrected
from qtool.quantize.experts import starved
from qtool.quantize.fused import fused_with
from qtool.quantize.linear import Chosen, quantize_linear
from qtool.quantize.methods.floats import shared_fp8_scale, shared_nvfp4_scale
from qtool.quantize.methods.rtn import rtn
from qtool.quantize.plan import Assignment, corrects
from qtool.quantize.scaling import Folded, fold_scales
from qtool.quantize.spread import spread

_MOST_DB = 200.0
"""Reported for a linear that lost nothing at all."""
_SMALL = 2**33
"""Of what a linear takes to work on, see `LoadedLayer.work`: 2048 by 2048."""


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer as a checkpoint stores it, by full tensor name, and what was done, by full module name."""

    tensors: dict[str, Tensor]
    records: dict[str, LinearRecord]


@dataclass(frozen=True)
class LoadedLayer:
    """A layer in float32, named `prefix`, and ways to run it as it is, folded or quantized in part.

    `dtypes` gives the stored dtype of each of its tensors by full name, which dense tensors and scales keep.
    `update` runs it on a few tokens, see `folding.absorbers`. `output_error` runs it on all windows, for one
    linear by its full name; None where the full-precision model was not run beside.
    """

    prefix: str
    module: nn.Module
    dtypes: Mapping[str, torch.dtype]
    update: Callable[[], Tensor]
    output_error: Callable[[str], OutputError] | None = None

    def weight(self, module: str) -> Tensor:
        """The weight [N, K] of a linear by its full name."""
        return self.module.get_parameter(f"{module}.weight".removeprefix(f"{self.prefix}."))

    def work(self, module: str) -> int:
        """``N K K``: products of numbers, about what a method computes several times over."""
        weight = self.weight(module)
        return weight.numel() * weight.shape[1]


@torch.no_grad()
def quantize_layer(
    layer: LoadedLayer,
    assigned: Mapping[str, Assignment],
    statistics: Mapping[str, InputStatistics],
    devices: Sequence[torch.device],
) -> QuantizedLayer:
    """Quantize the linears that `assigned` lists by full name; `layer` is changed on the way.

    `statistics` is what each of them sees, empty where the plan calibrates nothing; experts that saw too few
    tokens for their method are rounded to nearest. Linears are spread over `devices`, each with the same
    result on any. Where a method corrects, the last linear is quantized after the others and aims at the
    output of the full-precision model's layer.
    """
    seen, poor = dict(statistics), starved(assigned, statistics)
    assigned = {**assigned, **poor}
    before = {
        module: _sqnr_db(layer.weight(module), _rounding_error(layer, module, one), seen.get(module))
        for module, one in assigned.items()
        if not _just_rounds(one, seen.get(module))
    }
    folded = fold_scales(layer.prefix, layer.module, assigned, seen, layer.dtypes, layer.update)
    tensors = {}
    for name, value in layer.module.state_dict().items():
        full = f"{layer.prefix}.{name}"
        if full.removesuffix(".weight") not in assigned:
            tensors[full] = _stored(full, value, layer.dtypes[full])
    shared = {module: _shared_scale(layer, module, assigned) for module in assigned}
    closing = _closing(layer, assigned)

    @torch.no_grad()  # which each thread has to say for itself
    def quantize(module: str, device: torch.device) -> LinearRecord:
        assignment, weight, given = assigned[module], layer.weight(module), seen.get(module)
        scale = shared[module]
        try:
            if module == closing:
                weight, given = _aimed(layer, module, assignment)
            weight = weight.to(device)
            given = None if given is None else given.to(device)
            scale = None if scale is None else scale.to(device)
            chosen = quantize_linear(weight, given, assignment, layer.dtypes[f"{module}.weight"], scale)
        except QtoolError as error:
            raise QtoolError(f"{module}: {error}") from error
        tensors.update(
            compressed_tensors.encode(module, chosen.weight, calibrated(assignment.activation, given))
        )
        after = _sqnr_db(weight, chosen.weight.dequantize() - weight, given)
        layer.weight(module).copy_(chosen.weight.dequantize())
        record = _record(assignment, chosen, given, folded.get(module), before.get(module, after), after)
        return record.model_copy(update={"starved": True}) if module in poor else record

    free = sorted((module for module in assigned if module != closing), key=layer.work, reverse=True)
    workers = _side_by_side(devices, free, layer)
    records = dict(zip(free, spread(free, workers, quantize), strict=True))
    if closing is not None:
        records[closing] = quantize(closing, devices[0])
    return QuantizedLayer(tensors, {module: records[module] for module in assigned})


def _side_by_side(
    devices: Sequence[torch.device], modules: Sequence[str], layer: LoadedLayer
) -> Sequence[torch.device]:
    """The CPU as often as it has threads, or linears for them, where these are small.

    Most steps of GPTQ are too short there for several threads to share; products of large linears are not,
    and what several of those take at once would be most of the memory.
    """
    small = all(layer.work(module) <= _SMALL for module in modules)
    if len(devices) > 1 or devices[0].type != "cpu" or not small or not modules:
        return devices
    return [devices[0]] * min(len(modules), torch.get_num_threads())


def _closing(layer: LoadedLayer, assigned: Mapping[str, Assignment]) -> str | None:
    """The linear that corrects the layer's output, where its method says so."""
    if layer.output_error is None:
        return None
    name = closing_linear(
        layer.module, [module.removeprefix(f"{layer.prefix}.") for module in assigned], layer.update
    )
    module = f"{layer.prefix}.{name}"
    return module if name is not None and corrects(assigned[module].method) else None


def _aimed(layer: LoadedLayer, module: str, assignment: Assignment) -> tuple[Tensor, InputStatistics]:
    """What the closing linear should be, and what it sees now."""
    assert layer.output_error is not None
    assert isinstance(assignment.method, GptqOptions)
    error = layer.output_error(module)
    return corrected(layer.weight(module), error, assignment.method.damping), error.statistics


def _shared_scale(layer: LoadedLayer, module: str, assigned: Mapping[str, Assignment]) -> Tensor | None:
    """The scale of a whole tensor, for formats that have one: of all the linears that engines fuse."""
    scheme = assigned[module].scheme
    alike = [name for name in fused_with(module, assigned) if assigned[name].scheme == scheme]
    weights = [layer.weight(name) for name in alike]
    if isinstance(scheme, Fp8Scheme) and scheme.rows is None and scheme.columns is None:
        return shared_fp8_scale(weights, layer.dtypes[f"{module}.weight"])
    if isinstance(scheme, Fp4Scheme) and scheme.kind == "nvfp4":
        return shared_nvfp4_scale(weights)
    return None


def _stored(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    stored = value.to(dtype)
    if not is_finite(stored):
        raise QtoolError(
            f"{name}: does not fit {dtype} after folding channel scales; use another method there"
        )
    return stored


def _record(
    assignment: Assignment,
    chosen: Chosen,
    seen: InputStatistics | None,
    folded: Folded | None,
    before_db: float,
    after_db: float,
) -> LinearRecord:
    scheme = assignment.scheme
    return LinearRecord(
        method=chosen.method,
        scheme=str(assignment.computes_with),
        num_bits=scheme.num_bits,
        group_size=None if isinstance(scheme, Fp8Scheme) else scheme.group_size,
        symmetric=not isinstance(scheme, IntScheme) or scheme.symmetric,
        tokens=seen.tokens if seen else 0,
        dead_inputs=int((seen.max_abs == 0).sum()) if seen else 0,
        sqnr_rtn_db=before_db,
        sqnr_db=after_db,
        clip_ratio=chosen.clip_ratio,
        alpha=folded.alpha if folded else None,
        absorber=folded.source if folded else None,
    )


def _just_rounds(assignment: Assignment, seen: InputStatistics | None) -> bool:
    """Whether the method does to a linear what is done without any."""
    return seen is None and isinstance(assignment.method, Rtn) and not assignment.method.search_range


def _rounding_error(layer: LoadedLayer, module: str, assignment: Assignment) -> Tensor:
    """What a weight [N, K] loses without any method."""
    weight = layer.weight(module)
    return rtn(weight, assignment.scheme, layer.dtypes[f"{module}.weight"]).dequantize() - weight


def _sqnr_db(weight: Tensor, error: Tensor, seen: InputStatistics | None) -> float:
    """Power of the output of a weight [N, K] over that of its error, in dB."""
    signal, noise = _power(weight, seen), _power(error, seen)
    if noise <= signal * 10 ** (-_MOST_DB / 10):
        return _MOST_DB
    return max(10 * math.log10(signal / noise), -_MOST_DB) if signal > 0 else -_MOST_DB


def _power(weight: Tensor, seen: InputStatistics | None) -> float:
    """Of the output of a weight [N, K]; unseen inputs are taken to be noise of power 1.

    The weight is brought to 1 first: squares of what float32 holds need not fit into it.
    """
    largest = float(weight.abs().max())
    if not largest:
        return 0.0
    one = weight / largest
    power = seen.output_power(one) if seen else float(one.square().sum(1).sum(dtype=torch.float64))
    return largest**2 * power
