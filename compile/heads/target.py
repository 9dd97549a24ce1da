"""Which checkpoint a head was trained for, and whether another one is that, or made from it."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from qtool.compile.engine import ENGINE, read_spec
from qtool.compile.heads.config import HeadConfig
from qtool.core.files import sha256
from qtool.core.manifest import MANIFEST, Manifest

if TYPE_CHECKING:
    from qtool.core.checkpoint import Checkpoint

_log = logging.getLogger(__name__)
_WEIGHTS = ".safetensors"


def weight_digests(checkpoint: "Checkpoint") -> dict[str, str]:
    """sha256 of a checkpoint's weight files, by name."""
    return {file.name: sha256(file) for file in checkpoint.files if file.suffix == _WEIGHTS}


def warn_of_another_target(config: HeadConfig, head: Path, model: Path) -> None:
    """Log a warning when the model in `model`, engine or checkpoint, is neither what a head was trained for
    nor was quantized from it. A head that does not say passes.

    No error: answers are right with any head, and what was quantized elsewhere has no record of its source.
    """
    if not config.target:
        return
    known = _digests(model)
    if set(config.target.values()) <= known:
        return
    _log.warning(
        "%s: these heads were trained for other weights than those of %s, or that it is recorded to be "
        "quantized from; if it is another model, few of their drafts will be accepted: train heads for it "
        "with qtool train-draft",
        head,
        model,
    )


def _digests(model: Path) -> set[str]:
    """Of the weights of a model, and of what it was quantized from."""
    found: set[str] = set()
    if (model / MANIFEST).is_file():
        text = (model / MANIFEST).read_text(encoding="utf-8")
        found |= set(Manifest.model_validate_json(text).inputs.values())
    if (model / ENGINE).is_file():
        return found | set(read_spec(model).checkpoint.values())
    from qtool.core.checkpoint import Checkpoint  # needs torch, which engines do without

    return found | set(weight_digests(Checkpoint(model)).values())
