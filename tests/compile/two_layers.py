"""The first layers of SmolLM2, real weights in a checkpoint that is quick to compile."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from qtool.core.schemes import IntScheme
from tests.compile.checkpoints import edit_config, write_quantized

LAYERS = 2


def write_two_layers(smollm2: Path, folder: Path, schemes: dict[str, IntScheme]) -> Path:
    """The embedding and the first two layers, quantized as `schemes` says, in float16."""
    source = folder.with_name(f"{folder.name}.dense")
    shutil.copytree(smollm2, source)
    tensors = load_file(source / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < LAYERS
    }
    save_file(kept, source / "model.safetensors", metadata={"format": "pt"})
    edit_config(source, num_hidden_layers=LAYERS)
    return write_quantized(source, folder, schemes, torch.float16)
