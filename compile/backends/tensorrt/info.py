"""``engine_info.json``: what a plan is and how it has to be called. Read without torch or TensorRT."""

from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from qtool.core.records import read_record

INFO = "engine_info.json"
PLAN = "model.plan"


Kind = Literal["prefill", "decode", "verify"]
"""Of a call: a chunk of a prompt, the next token of each sequence, or drafts to verify."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Bounds(NamedTuple):
    """Shapes of an input within one profile."""

    low: tuple[int, ...]
    best: tuple[int, ...]
    high: tuple[int, ...]


class IoTensor(_Frozen):
    """An input or output of the plan."""

    name: str
    mode: Literal["input", "output"]
    dtype: str
    """As TensorRT writes it: Int32, Bool, Half, Float."""
    shape: tuple[int, ...]
    """-1 where calls differ."""
    profiles: tuple[Bounds, ...]
    """Of an input, in the order of the plan's profiles."""


class LayerTensor(_Frozen):
    """A tensor that a layer reads or writes."""

    dtype: str
    shape: tuple[int, ...]


class Layer(_Frozen):
    """One kernel of the plan."""

    name: str
    kind: str
    profile: int
    inputs: tuple[LayerTensor, ...]
    constants: tuple[LayerTensor, ...]
    outputs: tuple[LayerTensor, ...]
    nodes: tuple[str, ...]
    """Of the ONNX graph, those that it computes."""


class ProfileInfo(_Frozen):
    """One kind of call, in the order of the plan's profiles."""

    kind: Kind
    sizes: dict[str, tuple[int, int, int]]
    """Least, best and largest of B sequences, S new tokens, M blocks of past, R rows of logits, F of
    hidden states, P+S keys."""
    activation_bytes: int
    """Memory that a context of it needs on the device."""


class PoolLayout(_Frozen):
    """How keys, and values, of a layer lie on the device: [blocks · heads, block_size, head_dim]."""

    dtype: str
    """As TensorRT writes it."""
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    max_blocks: int
    """That the plan can address."""


class EngineInfo(_Frozen):
    """A plan, as its builder's inspector described it."""

    schema_version: int = 1
    target: str
    builder_version: str
    compute_capabilities: tuple[int, ...]
    """GPUs that the plan runs on, 86 being 8.6; empty where it was built for the GPU that was there."""
    plan_bytes: int
    weight_bytes: int
    """Of the plan's constants, which its profiles share."""
    predicted_weight_bytes: int
    predicted_plan_bytes: int
    profiles: tuple[ProfileInfo, ...]
    pool: PoolLayout
    max_context: int
    tensors: tuple[IoTensor, ...]
    folded_zero_points: int
    """Weights whose zero points became a correction term."""
    requantized: dict[str, float]
    """Linears that were rounded again without zero points: what that added, as signal to noise in decibel."""
    layers: tuple[Layer, ...]

    def save(self, folder: Path) -> None:
        """Write ``engine_info.json`` into `folder`."""
        (folder / INFO).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read_info(folder: Path) -> EngineInfo:
    """The ``engine_info.json`` of an engine folder; QtoolError says what is wrong with it."""
    return read_record(folder / INFO, EngineInfo, "compile the checkpoint again")


_PROGRAM_BYTES = 1_950_000
_PROGRAM_BYTES_A_LAYER = 335_000
_PROGRAM_BYTES_A_PRODUCT_OF_CODES = 100_000
_BYTES_A_POOL_ROW = 8


def predict_weight_bytes(graph_bytes: int, max_pool_rows: int) -> int:
    """Bytes of constants in a plan: the graph's, and a table over the rows that a pool may have."""
    return graph_bytes + _BYTES_A_POOL_ROW * max_pool_rows


def predict_plan_bytes(weight_bytes: int, num_layers: int, num_profiles: int, products_of_codes: int) -> int:
    """Bytes of a plan: its weights, and for each profile the program, which RTX plans hold as source.

    The program's size was measured with tensorrt_rtx 1.7.1 on 2 and 30 layers of SmolLM2; it depends neither
    on the layers' width nor on the number of compute capabilities. Rounding inputs takes more of it: 70 to
    130 kB a product, by how they are rounded.
    """
    layers = num_layers * _PROGRAM_BYTES_A_LAYER + products_of_codes * _PROGRAM_BYTES_A_PRODUCT_OF_CODES
    return weight_bytes + num_profiles * (_PROGRAM_BYTES + layers)
