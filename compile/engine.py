"""``engine.json``: what an engine folder holds. The runtime reads it without torch."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from qtool.compile.hidden import HiddenStates
from qtool.core.recipe import OpenVinoOptions
from qtool.core.records import read_record
from qtool.errors import QtoolError

ENGINE = "engine.json"
DRAFT_FOLDER = "draft"
"""In an engine's folder: the draft heads that were compiled with it, or the engine of a draft model."""
OWN_FILES = {
    "onnx": ("*.onnx", "*.data"),
    "openvino": ("*.xml", "*.bin"),
    "reference": ("*.safetensors",),
    "tensorrt": ("*.plan",),
    "tensorrt-rtx": ("*.plan",),
}
"""Patterns of the files that an engine for a target cannot do without."""


class EngineSpec(BaseModel):
    """One compiled model, and what its runtime has to know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: Literal[1] = 1
    target: str
    architecture: str
    vocab_size: PositiveInt
    max_context: PositiveInt
    """Positions that the model was made for, or fewer where the engine was built for fewer."""
    block_size: PositiveInt
    """Tokens a block of the KV pool holds."""
    kv_cache: Annotated[str, Field(pattern="^(f32|f16|bf16|u8)$")]
    """The precision of keys and values in the pool."""
    openvino: OpenVinoOptions | None = None
    """What its kernels round, if it is one for OpenVINO that rounds anything."""
    num_layers: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    window: PositiveInt | None
    """The last positions that a token attends to in the layers with the narrowest sliding window, if any."""
    weight_bytes: NonNegativeInt
    """Of the weights on disk."""
    kv_bytes_per_token: NonNegativeInt
    """Of the pool, all layers."""
    hidden_states: HiddenStates | None = None
    """What it gives of a token beside logits; None: nothing."""
    versions: dict[str, str]
    """Of the packages that built it."""
    checkpoint: dict[str, str]
    """sha256 of the source checkpoint's files, by name."""
    files: dict[str, NonNegativeInt] = {}
    """Bytes of the engine's own files, by name: they tell a copy that broke off, and cost nothing to ask."""

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        layers = () if self.hidden_states is None else self.hidden_states.layers
        for layer in layers:
            if isinstance(layer, int) and not 0 <= layer < self.num_layers:
                raise ValueError(f"hidden_states names layer {layer} of {self.num_layers}")
        return self

    @property
    def takes_trees(self) -> bool:
        """Whether one step verifies trees of drafts, and not chains alone: OpenVINO's keys of 8 bits share
        scales among the slots of a block, and its windows count slots, where a tree's positions differ."""
        return self.target != "openvino" or (self.kv_cache != "u8" and self.window is None)

    def save(self, folder: Path) -> None:
        """Write ``engine.json`` into `folder`."""
        (folder / ENGINE).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_spec(folder: Path) -> EngineSpec:
    """The ``engine.json`` of an engine folder; QtoolError says what is wrong with it."""
    return read_record(folder / ENGINE, EngineSpec, "compile the checkpoint again")


def own_files(folder: Path, target: str) -> dict[str, int]:
    """Bytes of the files in `folder` that make an engine for `target`, by name."""
    files = (file for pattern in OWN_FILES.get(target, ()) for file in sorted(folder.glob(pattern)))
    return {file.name: file.stat().st_size for file in files}


def check_files(folder: Path, spec: EngineSpec) -> None:
    """Raise QtoolError when a file of the engine is missing, has another size, or is for another target."""
    for pattern in OWN_FILES.get(spec.target, ()):
        if not any(folder.glob(pattern)):
            raise QtoolError(
                f"{folder}: holds no {pattern}, which an engine for {spec.target} has; copy or compile it "
                "again"
            )
    for name, size in spec.files.items():
        if not (folder / name).is_file():
            raise QtoolError(f"{folder / name}: is missing; copy or compile the engine again")
        if (found := (folder / name).stat().st_size) != size:
            raise QtoolError(
                f"{folder / name}: has {found} bytes, {ENGINE} says {size}; copy or compile the engine again"
            )
