"""Parts of a model that can be rounded, alone or together, and the KL that rounding them costs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qtool.calibrate.kv import KvRanges, KvRounding
from qtool.calibrate.layers import LayerRunner, checkpoint_weights
from qtool.calibrate.skeleton import HEAD, PREFIX
from qtool.core.activation import Activation
from qtool.core.schemes import ActivationScheme, KvCacheScheme, WeightScheme
from qtool.quantize.methods.rtn import rtn
from qtool.quantize.rounded_attention import Kind, rounded_attention


@dataclass(frozen=True)
class WeightPart:
    """The weights of a linear, by its full name."""

    name: str
    format: WeightScheme


@dataclass(frozen=True)
class InputPart:
    """The inputs of a linear, by its full name. The scheme has to be dynamic."""

    name: str
    format: ActivationScheme


@dataclass(frozen=True)
class CachePart:
    """The KV cache of a layer, by its attention's full name."""

    name: str
    format: KvCacheScheme


@dataclass(frozen=True)
class AttentionPart:
    """The products of a layer's attention, by its full name."""

    name: str
    format: Kind


Part = WeightPart | InputPart | CachePart | AttentionPart


def layer_of(part: Part) -> int | None:
    """The number of a part's layer; None for the head, which lies behind them."""
    return layer_number(part.name)


def layer_number(module: str) -> int | None:
    """The number of a module's layer, by its full name; None for the head."""
    return None if module == HEAD else int(module.removeprefix(f"{PREFIX}.").partition(".")[0])


def rounded(weight: Tensor, scheme: WeightScheme) -> Tensor:
    """A weight [N, K] rounded to nearest with the ranges of least square error, in float32."""
    return rtn(weight, scheme, torch.float16, search=True).dequantize()


@contextmanager
def changed(runner: LayerRunner, parts: Sequence[Part], base: Tensor) -> Iterator[KvRounding | None]:
    """Round `parts`, all of one loaded layer or the loaded head, while the block runs it.

    Yields the cache that it is to be run with. `base` [S, L, hidden] is what comes to the layer: a KV cache
    is rounded by the ranges that this makes.
    """
    cache, linears = None, runner.linears()
    with ExitStack() as undo:
        for part in parts:
            match part:
                case WeightPart():
                    linear = linears[part.name]
                    undo.enter_context(_weight(linear, rounded(linear.weight.data, part.format)))
                case InputPart():
                    how = Activation(part.format)
                    hook = linears[part.name].register_forward_pre_hook(
                        lambda _, args, how=how: (how.fake_quantize(args[0]),)
                    )
                    undo.callback(hook.remove)
                case CachePart():
                    cache = _rounded_cache(runner, part, base)
                case AttentionPart():
                    undo.enter_context(rounded_attention(runner.model, part.format))
        yield cache


@contextmanager
def _weight(linear: nn.Linear, weight: Tensor) -> Iterator[None]:
    before = linear.weight.data
    linear.weight.data = weight
    try:
        yield
    finally:
        linear.weight.data = before


def _rounded_cache(runner: LayerRunner, part: CachePart, hidden: Tensor) -> KvRounding:
    ranges, index = KvRanges(), layer_of(part)
    assert index is not None
    for _ in runner.run(index, hidden, ranges):
        pass
    return KvRounding(part.format, ranges.scales(part.format))


@torch.no_grad()
def measure(
    runner: LayerRunner, windows: Tensor, states: Sequence[Tensor], variants: Sequence[Sequence[Part]]
) -> list[float]:
    """KL(base || variant) in nats a token over windows [S, L], for variants that round some parts each.

    One pass through the model for all of them; `states` as `fisher.hidden_states` gives them. Memory holds a
    layer, and the hidden states of the windows once for each variant.
    """
    if not variants:
        return []
    found: dict[int, Tensor] = {}
    for index in range(len(runner)):
        here = [[part for part in parts if layer_of(part) == index] for parts in variants]
        begun = [number for number, parts in enumerate(here) if parts or number in found]
        if not begun:
            continue
        with runner.layer(index, checkpoint_weights(runner.checkpoint)):
            for number in begun:
                hidden = found.setdefault(number, states[index].clone())
                with changed(runner, here[number], states[index]) as cache:
                    runner.advance(index, hidden, cache)
    with runner.logits() as logits_of:
        return [
            _divergence(
                runner,
                windows,
                logits_of,
                (states[-1], found.get(number, states[-1])),
                [part for part in parts if layer_of(part) is None],
            )
            for number, parts in enumerate(variants)
        ]


def _divergence(
    runner: LayerRunner,
    windows: Tensor,
    logits_of: Callable[[Tensor, Tensor], Tensor],
    ends: tuple[Tensor, Tensor],
    head: Sequence[Part],
) -> float:
    """KL for what the last layer gives in the base and in a variant, in which the head may be rounded too."""
    with changed(runner, head, ends[0]):
        logits = [logits_of(window, end) for window, end in zip(windows, ends[1], strict=True)]
    total = 0.0
    for window, end, other in zip(windows, ends[0], logits, strict=True):
        wanted = logits_of(window, end).log_softmax(-1)
        each = (wanted.exp() * (wanted - other.log_softmax(-1))).sum(-1)
        total += float(each.sum(dtype=torch.float64))
    return total / windows.numel()
