"""A checkpoint without some of its layers: a draft model made from the model that it drafts for."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file

from qtool.core.checkpoint import COMPANIONS, SINGLE, Checkpoint
from qtool.core.files import new_folder
from qtool.errors import UsageError

_LAYER = re.compile(r"^(model\.layers\.)(\d+)(\..+)$")


def skip_layers(path: Path, skipped: frozenset[int], output: Path) -> None:
    """Write the checkpoint `path` without these layers to the new folder `output`, whole or not at all.

    What is left out is as if each of those layers added nothing (self-speculative decoding, Zhang et al.
    2024, section 3). Raises UsageError for layers that it lacks, for all of them, and for a quantized
    checkpoint, whose format may name layers.
    """
    checkpoint = Checkpoint(path)
    if checkpoint.format is not None:
        raise UsageError(f"{path}: is quantized; skip layers of what it was made from, then quantize that")
    count = int(checkpoint.config["num_hidden_layers"])
    kept = [layer for layer in range(count) if layer not in skipped]
    if len(kept) + len(skipped) != count or not kept:
        raise UsageError(f"{path}: has layers 0 to {count - 1}; name some of these to skip, and not all")
    place_of = {layer: place for place, layer in enumerate(kept)}
    tensors = {}
    for name in checkpoint:
        match = _LAYER.match(name)
        if match is None:
            tensors[name] = checkpoint.dense(name).contiguous()
        elif int(match[2]) in place_of:
            tensors[f"{match[1]}{place_of[int(match[2])]}{match[3]}"] = checkpoint.dense(name).contiguous()
    with new_folder(output) as folder:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        config = _without(checkpoint.config, kept, count)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for name in COMPANIONS:
            if (path / name).is_file():
                shutil.copyfile(path / name, folder / name)


def _without(config: Mapping[str, object], kept: list[int], count: int) -> dict[str, object]:
    """A config.json for the layers that are kept: what it lists by layer is thinned out too."""
    thinned = dict(config)
    thinned["num_hidden_layers"] = len(kept)
    for name, value in config.items():
        if isinstance(value, list) and len(value) == count:
            thinned[name] = [value[layer] for layer in kept]
    return thinned
