"""Let a layer's last linear make up for what quantization has changed before it.

GPTQ holds a linear to its full-precision self on the inputs that the quantized model gives it; what those
inputs have lost is never made up for. GPTAQ (Li et al. 2025, arXiv:2504.02692) holds it to its self on the
inputs of the full-precision model instead. The linear whose output is added to the residual stream can aim at
the whole error of its layer's output, in which is what all the layers before have lost too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qtool.calibrate.hidden import HiddenStates
from qtool.calibrate.layers import LayerRunner
from qtool.calibrate.replay import Replay
from qtool.calibrate.statistics import Collector, InputStatistics
from qtool.quantize.methods.gptq import inverse_factor, shrunk

_TOLERANCE = 1e-4
"""Of the output: float32 rounding stays far below."""


@dataclass(frozen=True)
class OutputError:
    """What a linear sees, and what its layer's output lacks beside it.

    cross [N, K] is ``(y - ŷ)ᵀ x / T`` for y the output of the full-precision model's layer, ŷ the quantized
    one's with this linear still in full precision, and x the linear's inputs.
    """

    statistics: InputStatistics
    cross: Tensor


@torch.no_grad()
def measure_error(
    runner: LayerRunner,
    index: int,
    hidden: HiddenStates,
    reference: HiddenStates,
    attention: Replay,
    module: str,
) -> OutputError:
    """Run the loaded layer on `hidden` and hold its output to `reference`, both [S, L, hidden].

    `attention` holds what the layer's attention makes of `hidden`, if that is known.
    """
    linear, collector = runner.linears()[module], Collector()
    cross = torch.zeros(linear.out_features, linear.in_features, device=runner.device)
    inputs: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        with attention.playing(), collector.watching({module: linear}):
            for wanted, output in zip(reference, runner.run(index, hidden), strict=True):
                cross.addmm_((wanted.to(runner.device) - output[0]).T, inputs.pop().flatten(0, -2).float())
    finally:
        hook.remove()
    statistics = collector.statistics()[module]
    return OutputError(statistics, cross / statistics.tokens)


def corrected(weight: Tensor, error: OutputError, damping: float) -> Tensor:
    """The weight [N, K] with what it can make up for of the error: least squares, shrunk like GPTQ's."""
    _, factor = inverse_factor(shrunk(error.statistics), damping)
    return weight + error.cross @ factor.T @ factor


def closing_linear(layer: nn.Module, names: list[str], update: Callable[[], Tensor]) -> str | None:
    """The last of `names` whose output is added to the layer's, unchanged; `update` as for `absorbers`.

    Tried, since names promise little: without the linear, the output lacks what the linear gives.
    """
    whole = update()
    for name in reversed(names):
        given: list[Tensor] = []

        def silence(_: nn.Module, __: object, output: Tensor, given: list[Tensor] = given) -> Tensor:
            given.append(output[0])
            return torch.zeros_like(output)

        hook = layer.get_submodule(name).register_forward_hook(silence)
        try:
            rest = update()
        finally:
            hook.remove()
        if given and given[0].shape == whole.shape:
            difference = (whole - rest - given[0]).norm()
            if bool(difference <= _TOLERANCE * whole.norm()):
                return name
    return None
