"""Mixtures of experts with a linear for each weight, named as checkpoints store them.

transformers keeps the weights of all experts of a layer in two tensors, which no statistics of single linears
could be gathered on. Its mixtures get experts of linears instead; routing stays transformers' own.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

ROUTER = "gate"
"""The module of a mixture that chooses experts."""

_EXPERT = re.compile(r"(.+\.experts\.\d+)\.[^.]+")


@dataclass(frozen=True)
class Names:
    """What a family's checkpoints call a mixture, and the linears of an expert."""

    mixture: str
    gate: str
    up: str
    down: str


_NAMES: dict[type[nn.Module], Names] = {
    MixtralSparseMoeBlock: Names("block_sparse_moe", "w1", "w3", "w2"),
    Qwen3MoeSparseMoeBlock: Names("mlp", "gate_proj", "up_proj", "down_proj"),
}


class Expert(nn.Module):
    """``down(act(gate(x)) * up(x))``, for x [T, hidden]."""

    def __init__(self, names: Names, hidden: int, intermediate: int, activation: nn.Module) -> None:
        super().__init__()
        self.names = names
        self.add_module(names.gate, nn.Linear(hidden, intermediate, bias=False))
        self.add_module(names.up, nn.Linear(hidden, intermediate, bias=False))
        self.add_module(names.down, nn.Linear(intermediate, hidden, bias=False))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = map(self.get_submodule, (self.names.gate, self.names.up, self.names.down))
        output: Tensor = down(self.activation(gate(x)) * up(x))
        return output


class Experts(nn.ModuleList):
    """The experts of a mixture, each run on the tokens that chose it.

    With `see_all` each is run on every token, only to be watched: outputs stay those of the chosen ones.
    """

    def __init__(self, names: Names, experts: Iterable[Expert]) -> None:
        super().__init__(experts)
        self.names = names
        self.see_all = False

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The sum [T, hidden] of what the experts top_k_index [T, k] make of hidden_states [T, hidden], each
        times its share top_k_weights [T, k]."""
        output = torch.zeros_like(hidden_states)
        for number, expert in enumerate(self):
            rows, rank = (top_k_index == number).nonzero(as_tuple=True)
            if self.see_all:
                given = expert(hidden_states)[rows]
            elif len(rows):
                given = expert(hidden_states[rows])
            else:
                continue
            output.index_add_(0, rows, (given * top_k_weights[rows, rank, None]).to(output.dtype))
        return output


def separate_experts(layers: nn.ModuleList, dtype: torch.dtype) -> None:
    """Give the mixtures among decoder layers experts of linears, without memory, under their stored names.

    Routers compute in float32 whatever the rest does: a token must reach the experts that it will reach in
    service. Mixtures of families that are not known here stay as they are.
    """
    for layer in layers:
        block: Any = getattr(layer, "mlp", None)
        names = _NAMES.get(type(block))
        if names is None:
            continue
        joined = block.experts
        with torch.device("meta"):
            experts = [
                Expert(names, joined.hidden_dim, joined.intermediate_dim, joined.act_fn).to(dtype)
                for _ in range(joined.num_experts)
            ]
        block.experts = Experts(names, experts)
        router = block.get_submodule(ROUTER)
        router.forward = torch.autocast("cpu", enabled=False)(router.forward)
        if names.mixture != "mlp":
            del layer.mlp
            layer.add_module(names.mixture, block)
            # The layer's own code calls it mlp; a plain attribute gives its weights no second name.
            object.__setattr__(layer, "mlp", block)


def mixtures(module: nn.Module) -> Iterator[tuple[str, Experts]]:
    """The mixtures within `module`: their names and their experts."""
    for name, part in module.named_modules():
        if isinstance(part, Experts):
            yield name.rpartition(".")[0], part


def routers(model: nn.Module) -> list[str]:
    """The modules that choose experts, by full name."""
    return [f"{name}.{ROUTER}" for name, _ in mixtures(model)]


@contextmanager
def showing_all(module: nn.Module) -> Iterator[None]:
    """Run every expert within `module` on every token while the block runs it, see `Experts.see_all`."""
    found = [experts for _, experts in mixtures(module)]
    for experts in found:
        experts.see_all = True
    try:
        yield
    finally:
        for experts in found:
            experts.see_all = False


def expert_of(linear: str) -> str | None:
    """The expert that a linear belongs to, such as ``model.layers.0.mlp.experts.3``, by their full names."""
    match = _EXPERT.fullmatch(linear)
    return match[1] if match else None
