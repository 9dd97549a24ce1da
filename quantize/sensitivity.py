"""Which parts of a model its answers care about most: estimated for all in one pass, checked for some."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from qtool.calibrate.layers import LayerRunner
from qtool.calibrate.skeleton import HEAD
from qtool.core.activation import Activation
from qtool.core.recipe import Quantization
from qtool.core.schemes import ActivationScheme, Fp8Scheme, IntScheme, KvCacheScheme
from qtool.quantize.changes import (
    AttentionPart,
    CachePart,
    InputPart,
    Part,
    WeightPart,
    changed,
    layer_of,
    measure,
    rounded,
)
from qtool.quantize.fisher import LayerTrace, expected_kl, hidden_states, trace
from qtool.quantize.plan import assign, candidates
from qtool.quantize.rounded_attention import Kind
from qtool.quantize.work import attention_of

What = Literal["weights", "activations", "KV cache", "attention"]
EXPECTED: tuple[What, ...] = ("weights", "activations", "KV cache", "attention")
"""From least to most sensitive, as the articles that this project follows have it."""
_WHAT: dict[type, What] = {
    WeightPart: "weights",
    InputPart: "activations",
    CachePart: "KV cache",
    AttentionPart: "attention",
}
Progress = Callable[[int, int], None]


class Sensitivity(BaseModel):
    """What rounding one part costs."""

    model_config = ConfigDict(frozen=True)

    what: What
    name: str
    """The full name of a linear, or of a layer's attention."""
    format: str
    kl: float
    """Estimated KL(base || rounded), nats a token. Of the head: measured, since nothing comes after it."""
    measured: float | None = None
    """The same, run; null where that was not checked."""


class Report(BaseModel):
    """The parts, most sensitive first, and how far the estimates can be trusted."""

    model_config = ConfigDict(frozen=True)

    parts: tuple[Sensitivity, ...]
    rank_correlation: float | None
    """Spearman's, between estimates and KL where that was measured; null below three parts."""
    together: dict[Kind, dict[What, float]]
    """KL with all parts of a kind in 8 bits at once, measured."""
    tokens: int

    def order(self, kind: Kind) -> tuple[What, ...]:
        """The kinds of parts from least to most sensitive."""
        return tuple(sorted(self.together[kind], key=self.together[kind].__getitem__))


def estimate(
    runner: LayerRunner,
    windows: Tensor,
    states: Sequence[Tensor],
    parts: Sequence[Part],
    seed: int,
    progress: Progress = lambda done, total: None,
) -> dict[Part, float]:
    """KL in nats a token for rounding each of `parts` alone, from one pass forth and back.

    For linears the change of their outputs is held against its gradient, for caches and attentions that of
    their layer's; the head's is measured. An expert counts for the share of tokens that chose it, with none
    for nothing. `states` as `fisher.hidden_states` gives them.
    """
    heads = [part for part in parts if layer_of(part) is None]
    found = dict(zip(heads, measure(runner, windows, states, [[part] for part in heads]), strict=True))
    in_layer: dict[int | None, list[Part]] = defaultdict(list)
    for part in parts:
        in_layer[layer_of(part)].append(part)
    for done, one in enumerate(trace(runner, windows, states, seed), 1):
        for part in in_layer[one.index]:
            found[part] = _estimate(runner, one, states[one.index + 1], part)
        progress(done, len(runner))
    return {part: found[part] for part in parts}


@torch.no_grad()
def _estimate(runner: LayerRunner, layer: LayerTrace, output: Tensor, part: Part) -> float:
    if isinstance(part, WeightPart | InputPart):
        if part.name not in layer.linears:
            return 0.0
        inputs, gradient = layer.linears[part.name]
        weight = runner.linears()[part.name].weight
        if isinstance(part, WeightPart):
            change = inputs @ (rounded(weight, part.format) - weight).T
        else:
            change = (Activation(part.format).fake_quantize(inputs) - inputs) @ weight.T
        return expected_kl(change, gradient) * len(gradient) / layer.hidden[..., 0].numel()
    with changed(runner, [part], layer.hidden) as cache:
        given = torch.cat(list(runner.run(layer.index, layer.hidden, cache)))
    return expected_kl((given - output).flatten(0, 1), layer.gradient.flatten(0, 1))


def default_parts(runner: LayerRunner) -> list[Part]:
    """Every linear's weights in 4 bits and inputs in 8, every layer's KV cache and attention in 8."""
    parts: list[Part] = []
    for name, linear in runner.linears().items():
        size = next((size for size in (128, 96, 64, 32) if linear.in_features % size == 0), None)
        parts.append(WeightPart(name, IntScheme(4, size, True)))
        parts.append(InputPart(name, ActivationScheme("int8", dynamic=True)))
    for index in range(len(runner)):
        parts.append(CachePart(attention_of(index), KvCacheScheme("int8")))
        parts.append(AttentionPart(attention_of(index), "int8"))
    return parts


def recipe_parts(runner: LayerRunner, quantization: Quantization) -> list[Part]:
    """What a recipe rounds, or may round; inputs by the range of each token, calibrated ones too."""
    linears = {name: linear.in_features for name, linear in runner.linears().items()}
    parts: list[Part] = []
    for name, one in assign(quantization, linears).items():
        parts.append(WeightPart(name, one.scheme))
        if one.activation is not None:
            parts.append(InputPart(name, replace(one.activation, dynamic=True)))
    for name, schemes in candidates(quantization, linears).items():
        parts += [WeightPart(name, scheme) for scheme in dict.fromkeys(schemes)]
    if quantization.kv_cache is not None:
        scheme = quantization.kv_cache.scheme
        parts += [CachePart(attention_of(index), scheme) for index in range(len(runner))]
    return parts


def eight_bits(runner: LayerRunner, kind: Kind) -> dict[What, list[Part]]:
    """All parts of the layers in 8 bits, by what they are."""
    weights = IntScheme(8, None, True) if kind == "int8" else Fp8Scheme(1, None)
    linears = [name for name in runner.linears() if name != HEAD]
    attentions = [attention_of(index) for index in range(len(runner))]
    return {
        "weights": [WeightPart(name, weights) for name in linears],
        "activations": [InputPart(name, ActivationScheme(kind, dynamic=True)) for name in linears],
        "KV cache": [CachePart(name, KvCacheScheme(kind)) for name in attentions],
        "attention": [AttentionPart(name, kind) for name in attentions],
    }


def sensitivity(
    runner: LayerRunner,
    windows: Tensor,
    parts: Sequence[Part],
    *,
    checked: int = 12,
    seed: int = 0,
    progress: Progress = lambda done, total: None,
) -> Report:
    """Rank `parts` by the KL that rounding each alone would cost on windows [S, L].

    `checked` of them, spread evenly over the ranking, are measured too. `seed` draws what the model says.
    """
    states = hidden_states(runner, windows)
    found = estimate(runner, windows, states, parts, seed, progress)
    ranked = sorted(found, key=found.__getitem__, reverse=True)
    sample = _spread([part for part in ranked if layer_of(part) is not None], checked)
    kinds: tuple[Kind, ...] = ("int8", "fp8")
    groups = {kind: eight_bits(runner, kind) for kind in kinds}
    variants = [[part] for part in sample] + [group for kind in kinds for group in groups[kind].values()]
    kls = measure(runner, windows, states, variants)
    measured = dict(zip(sample, kls, strict=False))
    rest = iter(kls[len(sample) :])
    return Report(
        parts=tuple(
            Sensitivity(
                what=_WHAT[type(part)],
                name=part.name,
                format=_said(part),
                kl=found[part],
                measured=measured.get(part),
            )
            for part in ranked
        ),
        rank_correlation=_spearman([found[part] for part in sample], [measured[part] for part in sample]),
        together={kind: {what: next(rest) for what in groups[kind]} for kind in kinds},
        tokens=windows.numel(),
    )


def _said(part: Part) -> str:
    return part.format if isinstance(part, AttentionPart) else str(part.format)


def _spread(ranked: Sequence[Part], count: int) -> list[Part]:
    """At most `count` of a ranking, its ends among them."""
    if len(ranked) <= count:
        return list(ranked)
    return [ranked[round(place * (len(ranked) - 1) / max(count - 1, 1))] for place in range(count)]


def _spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    if len(one) < 3:
        return None
    ranks = torch.stack([torch.tensor(values).argsort().argsort().double() for values in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])
