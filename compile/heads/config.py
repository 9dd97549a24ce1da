"""``head.json``: what a draft head is and which hidden states of its target it reads."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from qtool.compile.config import DecoderConfig, read_config
from qtool.compile.hidden import FINAL, HiddenLayer
from qtool.core.records import read_record
from qtool.errors import UsageError

HEAD_CONFIG = "head.json"
WANTED = "wanted draft heads; compile --draft also takes a draft model's engine, which has an engine.json"
"""What a folder that holds no heads is told."""
HeadKind = Literal["medusa", "eagle", "eagle3"]


class HeadConfig(BaseModel):
    """One draft head.

    - ``medusa`` (Cai et al. 2024, section 2.1): head k is residual blocks over the final hidden state of
      token i, and proposes token i + 2 + k, each on its own.
    - ``eagle`` (Li et al. 2024, section 4.1): one decoder layer over the embedding of token i beside the
      final hidden state of token i - 1; what it gives stands for the final hidden state of token i.
    - ``eagle3`` (Li et al. 2025, section 3): the same over hidden states of several layers, fused into one;
      what it gives need not resemble any of the target's.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 1
    kind: HeadKind
    hidden_size: int
    """Features of the target's hidden states, and of the head's own."""
    vocab_size: int
    """Of the target."""
    draft_vocab_size: int
    """Tokens that the head can propose: the frequent ones suffice (FR-Spec, Zhao et al. 2025)."""
    hidden_layers: tuple[HiddenLayer, ...] = (FINAL,)
    """Of the target, in the order in which the head reads them."""
    num_heads: int = 0
    """Of Medusa: how many tokens after the next one are proposed."""
    num_blocks: int = 1
    """Of Medusa: residual blocks of a head."""
    layer: dict[str, object] = {}
    """Of EAGLE: its layer, as the config.json of a model that has no other."""
    norm_before_residual: bool = False
    """Of EAGLE-3: whether the fused features are normed before they are added to what attention gives."""
    target: dict[str, str] = {}
    """sha256 of the weight files of the checkpoint that the head was trained for, by name; none where that is
    not known, as of published heads."""

    def decoder(self) -> DecoderConfig:
        """EAGLE's layer; QtoolError when it is described wrongly."""
        return read_config({"num_hidden_layers": 1, **self.layer}, f"{HEAD_CONFIG}: layer")

    def save(self, folder: Path) -> None:
        """Write ``head.json`` into `folder`."""
        text = self.model_dump_json(indent=2, exclude_defaults=True)
        (folder / HEAD_CONFIG).write_text(text + "\n", encoding="utf-8")


def read_head_config(folder: Path) -> HeadConfig:
    """The ``head.json`` of a folder; QtoolError says what is wrong with it."""
    return read_record(folder / HEAD_CONFIG, HeadConfig, "train or fetch the head again")


def refuse_file(path: Path) -> None:
    """Raise UsageError for a path that is a file, or nothing, where a folder of heads is wanted."""
    if path.is_file():
        raise UsageError(f"{path}: is a file; name the folder of the heads, {path.parent}")
    if not path.is_dir():
        raise UsageError(f"{path}: does not exist; wanted a folder of draft heads")
