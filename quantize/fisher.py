"""How much the model's answers care about each layer: gradients of its own log-likelihood, layer by layer.

For a small change δ of what a layer gives, KL(base || changed) is ``½ δᵀFδ`` to second order, with F the
Fisher information: the expectation of ``ggᵀ`` over tokens that the model itself would say, g the gradient of
their log-probability (Amari 1998, Natural gradient works efficiently in learning, section 2). One draw of
those tokens gives a g for each position, and the mean of ``½ (g·δ)²`` over positions estimates the KL of one.
It takes changes at different positions for independent, which they are in part: KL is often somewhat higher.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from qtool.calibrate.layers import LayerRunner, checkpoint_weights


@dataclass(frozen=True)
class LayerTrace:
    """What passes a loaded layer, and how the log-likelihood changes with it.

    hidden and gradient [S, L, hidden]: what comes to the layer, and g of what it gives. linears: by full
    name, the inputs [T, K] of each linear, and g of its outputs [T, N].
    """

    index: int
    layer: nn.Module
    hidden: Tensor
    gradient: Tensor
    linears: Mapping[str, tuple[Tensor, Tensor]]


def hidden_states(runner: LayerRunner, windows: Tensor) -> list[Tensor]:
    """What comes to each layer for windows [S, L], and last what the last one gives, each [S, L, hidden]."""
    states = [runner.embed(windows)]
    for index in range(len(runner)):
        with runner.layer(index, checkpoint_weights(runner.checkpoint)):
            states.append(torch.cat(list(runner.run(index, states[-1], exact=True))))
    return states


def trace(runner: LayerRunner, windows: Tensor, states: Sequence[Tensor], seed: int) -> Iterator[LayerTrace]:
    """Every layer from last to first, loaded while it is the latest; `states` are from `hidden_states`."""
    gradient = _gradient(runner, windows, states[-1], seed)
    for index in reversed(range(len(runner))):
        with runner.layer(index, checkpoint_weights(runner.checkpoint)) as layer:
            before, linears = _back(runner, index, states[index], gradient)
            yield LayerTrace(index, layer, states[index], gradient, linears)
        gradient = before


def _gradient(runner: LayerRunner, windows: Tensor, hidden: Tensor, seed: int) -> Tensor:
    """g of what the last layer gives, [S, L, hidden]."""
    generator, found = torch.Generator().manual_seed(seed), []
    with runner.logits() as logits_of:
        for window, state in zip(windows, hidden, strict=True):
            leaf = state.detach().requires_grad_()
            log_probs = logits_of(window, leaf).log_softmax(-1)
            said = torch.multinomial(log_probs.detach().exp(), 1, generator=generator)
            found += torch.autograd.grad(log_probs.gather(1, said).sum(), leaf)
    return torch.stack(found)


def _back(
    runner: LayerRunner, index: int, hidden: Tensor, gradient: Tensor
) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
    """g of what comes to the loaded layer, and what its linears see with g of what they give."""
    prefix = f"model.layers.{index}."
    linears = {name: one for name, one in runner.linears().items() if name.startswith(prefix)}
    before: list[Tensor] = []
    inputs: dict[str, list[Tensor]] = {name: [] for name in linears}
    gradients: dict[str, list[Tensor]] = {name: [] for name in linears}
    for window, given in zip(hidden, gradient, strict=True):
        outputs: dict[str, Tensor] = {}
        with ExitStack() as hooks:
            for name, linear in linears.items():
                hook = linear.register_forward_hook(partial(_keep, name, inputs, outputs))
                hooks.callback(hook.remove)
            leaf = window.detach().requires_grad_()
            output = runner.call(index, leaf)
        first, *others = torch.autograd.grad(output, [leaf, *outputs.values()], given[None])
        before.append(first)
        for name, one in zip(outputs, others, strict=True):
            gradients[name].append(one.flatten(0, -2))
    seen = {name: (torch.cat(inputs[name]), torch.cat(gradients[name])) for name in linears if inputs[name]}
    return torch.stack(before), seen


def _keep(
    name: str,
    inputs: dict[str, list[Tensor]],
    outputs: dict[str, Tensor],
    _: nn.Module,
    args: tuple[Any, ...],
    output: Tensor,
) -> None:
    inputs[name].append(args[0].detach().flatten(0, -2))
    outputs[name] = output


def expected_kl(change: Tensor, gradient: Tensor) -> float:
    """KL in nats a token for a change [T, N] of numbers whose g is `gradient` [T, N]."""
    return float((change * gradient).sum(-1).square().mean(dtype=torch.float64)) / 2
