"""Quantize one layer: fold what AWQ asks for, then each linear by its method."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qtool.calibrate.statistics import InputStatistics
from qtool.core.formats import compressed_tensors
from qtool.core.manifest import LinearRecord
from qtool.core.qtensor import QuantizedTensor
from qtool.core.recipe import Awq, Gptq, Rtn
from qtool.errors import QtoolError
from qtool.quantize.folding import absorbers, fold
from qtool.quantize.methods.awq import awq, search_scale
from qtool.quantize.methods.gptq import gptq
from qtool.quantize.methods.rtn import rtn
from qtool.quantize.plan import Assignment

_MOST_DB = 200.0
"""Reported for a linear that lost nothing at all."""


@dataclass(frozen=True)
class QuantizedLayer:
    """A layer as a checkpoint stores it, by full tensor name, and what was done, by full module name."""

    tensors: dict[str, Tensor]
    records: dict[str, LinearRecord]


@dataclass(frozen=True)
class _Folded:
    source: str
    alpha: float


@torch.no_grad()
def quantize_layer(
    prefix: str,
    layer: nn.Module,
    assigned: Mapping[str, Assignment],
    statistics: Mapping[str, InputStatistics],
    dtypes: Mapping[str, torch.dtype],
    update: Callable[[], Tensor],
) -> QuantizedLayer:
    """Quantize the linears of `layer` (named ``PREFIX.NAME``) that `assigned` lists by full name.

    `layer` holds float32 weights and is changed by folding; `dtypes` gives the stored dtype of each of its
    tensors by full name, which dense tensors and scales keep. `update` runs the layer on a few tokens, see
    `folding.absorbers`.
    """
    statistics = dict(statistics)
    folded = _fold_scales(prefix, layer, assigned, statistics, dtypes, update)
    tensors = {}
    for name, value in layer.state_dict().items():
        full = f"{prefix}.{name}"
        if full.removesuffix(".weight") not in assigned:
            tensors[full] = _stored(full, value, dtypes[full])
    records = {}
    for module, assignment in assigned.items():
        weight = layer.get_parameter(f"{module.removeprefix(prefix + '.')}.weight")
        seen, dtype = statistics[module], dtypes[f"{module}.weight"]
        try:
            quantized, clip_ratio = _quantize(weight, seen, assignment, dtype)
        except QtoolError as error:
            raise QtoolError(f"{module}: {error}") from error
        tensors |= compressed_tensors.encode(module, quantized)
        fold_of = folded.get(module)
        records[module] = LinearRecord(
            method=assignment.method.name,
            num_bits=assignment.scheme.num_bits,
            group_size=assignment.scheme.group_size,
            symmetric=assignment.scheme.symmetric,
            sqnr_db=_sqnr_db(weight, quantized, seen),
            clip_ratio=clip_ratio,
            awq_alpha=fold_of.alpha if fold_of else None,
            awq_absorber=fold_of.source if fold_of else None,
        )
    return QuantizedLayer(tensors, records)


def _fold_scales(
    prefix: str,
    layer: nn.Module,
    assigned: Mapping[str, Assignment],
    statistics: dict[str, InputStatistics],
    dtypes: Mapping[str, torch.dtype],
    update: Callable[[], Tensor],
) -> dict[str, _Folded]:
    """Search and fold AWQ's scales wherever the layer can absorb them; `statistics` follows the fold.

    Readers of the same input that are not AWQ's are compensated, not searched for.
    """
    options = {module: one.method for module, one in assigned.items() if isinstance(one.method, Awq)}
    folded: dict[str, _Folded] = {}
    if not options:
        return folded
    for absorber in absorbers(layer, update):
        readers = [f"{prefix}.{reader}" for reader in absorber.readers]
        searched = [module for module in readers if module in options]
        if not searched:
            continue
        found = search_scale(
            [layer.get_parameter(f"{module.removeprefix(prefix + '.')}.weight") for module in searched],
            statistics[searched[0]],
            [assigned[module].scheme for module in searched],
            options[searched[0]],
            dtypes[f"{searched[0]}.weight"],
        )
        fold(layer, absorber, found.scale)
        for module in readers:
            if module in statistics:
                statistics[module] = statistics[module].divided(found.scale)
        folded |= dict.fromkeys(searched, _Folded(absorber.source, found.alpha))
    return folded


def _quantize(
    weight: Tensor, seen: InputStatistics, assignment: Assignment, dtype: torch.dtype
) -> tuple[QuantizedTensor, float | None]:
    method, scheme = assignment.method, assignment.scheme
    match method:
        case Rtn():
            return rtn(weight, scheme, method, dtype), None
        case Awq():
            return awq(weight, seen, scheme, method, dtype)
        case Gptq():
            return gptq(weight, seen, scheme, method, dtype), None


def _stored(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    stored = value.to(dtype)
    if not bool(stored.isfinite().all()):
        raise QtoolError(f"{name}: does not fit {dtype} after folding AWQ's scales; use another method there")
    return stored


def _sqnr_db(weight: Tensor, quantized: QuantizedTensor, seen: InputStatistics) -> float:
    signal, noise = seen.output_power(weight), seen.output_power(quantized.dequantize() - weight)
    if noise <= signal * 10 ** (-_MOST_DB / 10):
        return _MOST_DB
    return 10 * math.log10(signal / noise) if signal > 0 else -_MOST_DB
