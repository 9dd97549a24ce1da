"""Which norm or linear can absorb a channel scale, so that the graph does not change.

Linears that read ``x`` may have their weight columns multiplied by s when x itself is divided by s; and x is
divided by dividing the rows of the weight that made it: a norm's, or a linear's whose output reaches the
readers channel by channel. The norm before a mixture of experts is read by all of them, and by their router.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qtool.calibrate.experts import ROUTER, mixtures

_CANDIDATES = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("input_layernorm", ("self_attn.qkv_proj",)),
    ("self_attn.v_proj", ("self_attn.o_proj",)),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
    ("post_attention_layernorm", ("mlp.gate_up_proj",)),
    ("mlp.up_proj", ("mlp.down_proj",)),
)
_TOLERANCE = 1e-3
"""Of what a layer adds to a token: float32 rounding stays far below, a wrong absorber far above."""


@dataclass(frozen=True)
class Absorber:
    """A module of a layer, `source`, and all the linears that read what it makes; names within the layer."""

    source: str
    readers: tuple[str, ...]
    routes: bool = False
    """Whether one of the readers is a router."""


def absorbers(layer: nn.Module, update: Callable[[], Tensor]) -> list[Absorber]:
    """The exact absorbers among the usual names that exist in `layer`, in the order of the forward pass.

    Names promise little (one architecture's ``post_attention_layernorm`` feeds the MLP, another's the
    residual; a norm's weight may stand for ``1 + weight``), so each is tried: `update` runs the layer and
    gives what it adds to each token, [T, hidden], which must be the same after a trial fold. Within an expert
    nothing is tried, since those are `calibrate.experts`' own.
    """
    parts = dict(layer.named_modules())
    usual = [Absorber(source, readers) for source, readers in _CANDIDATES]
    found = [
        absorber
        for absorber in [*usual, *_before_experts(layer)]
        if all(name in parts for name in (absorber.source, *absorber.readers))
        and _fits(parts[absorber.source], parts[absorber.readers[0]])
    ]
    if not found:
        return []
    expected = update()
    exact = [absorber for absorber in found if _is_exact(layer, absorber, update, expected)]
    return [*exact, *_within_experts(layer)]


def _before_experts(layer: nn.Module) -> list[Absorber]:
    """The norm that all the experts of the layer may read, and their router."""
    found = []
    for mixture, experts in mixtures(layer):
        readers = [
            f"{mixture}.experts.{number}.{linear}"
            for number in range(len(experts))
            for linear in (experts.names.gate, experts.names.up)
        ]
        readers.append(f"{mixture}.{ROUTER}")
        found.append(Absorber("post_attention_layernorm", tuple(readers), routes=True))
    return found


def _within_experts(layer: nn.Module) -> list[Absorber]:
    return [
        Absorber(f"{expert}.{experts.names.up}", (f"{expert}.{experts.names.down}",))
        for mixture, experts in mixtures(layer)
        for expert in (f"{mixture}.experts.{number}" for number in range(len(experts)))
    ]


def _fits(source: nn.Module, reader: nn.Module) -> bool:
    weight = getattr(source, "weight", None)
    return isinstance(weight, Tensor) and isinstance(reader, nn.Linear) and len(weight) == reader.in_features


def _is_exact(layer: nn.Module, absorber: Absorber, update: Callable[[], Tensor], expected: Tensor) -> bool:
    source = layer.get_parameter(f"{absorber.source}.weight")
    # Powers of two, so that unfolding brings the weights back bit by bit.
    scale = 2.0 ** (torch.arange(len(source), device=source.device) % 3 - 1)
    fold(layer, absorber, scale)
    difference = (update() - expected).norm(dim=-1)
    fold(layer, absorber, 1 / scale)
    return bool((difference <= _TOLERANCE * expected.norm(dim=-1)).all())


@torch.no_grad()
def fold(layer: nn.Module, absorber: Absorber, scale: Tensor) -> None:
    """Multiply the readers' columns by scale [K] and divide the source by it, in place, in float32."""
    source = layer.get_submodule(absorber.source)
    for parameter in source.parameters(recurse=False):
        parameter.div_(scale.view(-1, *[1] * (parameter.dim() - 1)))
    for reader in absorber.readers:
        layer.get_parameter(f"{reader}.weight").mul_(scale)
