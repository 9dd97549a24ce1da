"""``engine.json``: what an engine folder holds. The runtime reads it without torch."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from qtool.compile.hidden import HiddenStates
from qtool.core.recipe import OpenVinoOptions
from qtool.errors import QtoolError

ENGINE = "engine.json"


class EngineSpec(BaseModel):
    """One compiled model, and what its runtime has to know."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    target: str
    architecture: str
    vocab_size: int
    max_context: int
    """Positions that the model was made for, or fewer where the engine was built for fewer."""
    block_size: int
    """Tokens a block of the KV pool holds."""
    kv_cache: str
    """The precision of keys and values in the pool."""
    openvino: OpenVinoOptions | None = None
    """What its kernels round, if it is one for OpenVINO that rounds anything."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    """The last positions that a token attends to in the layers with the narrowest sliding window, if any."""
    weight_bytes: int
    """Of the weights on disk."""
    kv_bytes_per_token: int
    """Of the pool, all layers."""
    hidden_states: HiddenStates | None = None
    """What it gives of a token beside logits; None: nothing."""
    versions: dict[str, str]
    """Of the packages that built it."""
    checkpoint: dict[str, str]
    """sha256 of the source checkpoint's files, by name."""

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
    file = folder / ENGINE
    try:
        return EngineSpec.model_validate_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise QtoolError(f"{file}: cannot be read ({error.strerror})") from error
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise QtoolError(f"{file}: {where}: {problem['msg']}; compile the checkpoint again") from error
