"""Quantize one linear by its method."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.calibrate.statistics import InputStatistics
from qtool.core.qtensor import Quantized
from qtool.core.recipe import Awq, AwqGptq, Best, Gptq, Rtn, SmoothQuant
from qtool.quantize.methods.awq import awq
from qtool.quantize.methods.gptq import gptq, shrunk
from qtool.quantize.methods.rtn import rtn
from qtool.quantize.plan import Assignment


@dataclass(frozen=True)
class Chosen:
    """A quantized weight, the method that made it, and by how much ranges were shrunk where it searched."""

    weight: Quantized
    method: str
    clip_ratio: float | None = None


def quantize_linear(
    weight: Tensor,
    seen: InputStatistics | None,
    assignment: Assignment,
    dtype: torch.dtype,
    shared: Tensor | None = None,
) -> Chosen:
    """Quantize a weight [N, K] that carries its channel scales; integer scales are stored in `dtype`.

    What the method does not go by may be unseen. `shared` is the tensor's scale that fused linears have in
    common, see `methods.floats`. Raises QtoolError for inputs whose Hessian cannot be inverted.
    """
    method, scheme = assignment.method, assignment.scheme
    if isinstance(method, Rtn | SmoothQuant):
        return Chosen(rtn(weight, scheme, dtype, search=method.search_range, shared=shared), method.name)
    assert seen is not None  # the plan saw to that
    match method:
        case Awq():
            return Chosen(*_awq(weight, seen, assignment, dtype, shared, clip=method.clip))
        case Gptq() | AwqGptq():
            return Chosen(gptq(weight, seen, scheme, method, dtype, shared), method.name)
        case Best():
            hessian = shrunk(seen)

            def error(one: Chosen) -> float:
                difference = one.weight.dequantize() - weight
                return float(((difference @ hessian) * difference).sum(dtype=torch.float64))

            return min(_candidates(weight, seen, assignment, method, dtype, shared), key=error)


def _candidates(
    weight: Tensor,
    seen: InputStatistics,
    assignment: Assignment,
    method: Best,
    dtype: torch.dtype,
    shared: Tensor | None,
) -> Iterator[Chosen]:
    scheme = assignment.scheme
    yield Chosen(rtn(weight, scheme, dtype, search=True, shared=shared), "rtn")
    yield Chosen(*_awq(weight, seen, assignment, dtype, shared))
    yield Chosen(gptq(weight, seen, scheme, method, dtype, shared), "awq+gptq")


def _awq(
    weight: Tensor,
    seen: InputStatistics,
    assignment: Assignment,
    dtype: torch.dtype,
    shared: Tensor | None,
    *,
    clip: bool = True,
) -> tuple[Quantized, str, float]:
    quantized, ratio = awq(weight, seen, assignment.scheme, dtype, clip=clip, shared=shared)
    return quantized, "awq", ratio
