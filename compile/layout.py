"""Where a family's checkpoints keep what the decoder asks for by name."""

from dataclasses import dataclass, replace

from torch import Tensor

from qtool.compile.config import DecoderConfig
from qtool.compile.decoder import linear_shapes
from qtool.core.qtensor import Fp4Tensor, Fp8Tensor, Linear, QuantizedTensor, Weight


@dataclass(frozen=True)
class Place:
    """Some rows of a stored linear."""

    module: str
    """Its name in the checkpoint."""
    rows: range


FUSED: dict[str, dict[str, tuple[str, ...]]] = {
    "Phi3ForCausalLM": {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    },
}
"""By architecture: linears that are stored as one, their rows one after another."""

RENAMED: dict[str, dict[str, str]] = {
    "MixtralForCausalLM": {
        "mlp": "block_sparse_moe",
        "gate_proj": "w1",
        "up_proj": "w3",
        "down_proj": "w2",
    },
}
"""By architecture: parts of a name that are called otherwise."""


def places(config: DecoderConfig) -> dict[str, Place]:
    """Where each linear of the decoder is stored, in the decoder's order."""
    fused = {part: whole for whole, parts in FUSED.get(config.architecture, {}).items() for part in parts}
    renamed = RENAMED.get(config.architecture, {})
    ends: dict[str, int] = {}
    found = {}
    for name, (out_features, _) in linear_shapes(config).items():
        parent, _, last = name.rpartition(".")
        module = f"{parent}.{fused[last]}" if last in fused else name
        module = ".".join(renamed.get(part, part) for part in module.split("."))
        start = ends.get(module, 0)
        ends[module] = start + out_features
        found[name] = Place(module, range(start, ends[module]))
    return found


def cut(linear: Linear, rows: range) -> Linear:
    """The linear of some of the outputs of `linear`, with memory of its own."""
    own = slice(rows.start, rows.stop)
    bias = None if linear.bias is None else linear.bias[own].clone()
    return replace(linear, weight=_cut_weight(linear.weight, own), bias=bias)


def _cut_weight(weight: Weight, own: slice) -> Weight:
    if isinstance(weight, Tensor):
        return weight[own].clone()
    if isinstance(weight, Fp4Tensor):
        part = weight.rows(own)
        return replace(part, codes=part.codes.clone(), scale=part.scale.clone())
    codes = weight.codes[own].clone()
    if isinstance(weight, QuantizedTensor):
        zero_point = None if weight.zero_point is None else weight.zero_point[own].clone()
        return replace(weight, codes=codes, scale=weight.scale[own].clone(), zero_point=zero_point)
    return Fp8Tensor(codes, weight.by_row().scale[own], weight.by_row().scheme)
