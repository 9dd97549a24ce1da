"""transformers' own model of a checkpoint, without weights, and what a checkpoint has to store for it."""

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from qtool.calibrate.experts import separate_experts
from qtool.core.checkpoint import Checkpoint
from qtool.errors import QtoolError, UsageError

PREFIX = "model.layers"
HEAD = "lm_head"

COMPUTED = "rotary_emb.inv_freq"
"""Stored by old checkpoints, computed from the config by today's engines."""

_DTYPES = ("F16", "BF16", "F32")


def skeleton(checkpoint: Checkpoint) -> Any:
    """The decoder that config.json describes, its tensors without memory, in float32.

    Its parts have the names that checkpoints store, and experts linears of their own, see `experts`. Raises
    UsageError when transformers makes no decoder of it, or another than it names.
    """
    architecture = checkpoint.architecture
    model = _from_config(checkpoint)
    if type(model).__name__ != architecture:
        raise UsageError(
            f"{checkpoint.path / 'config.json'}: architectures names {architecture!r}, but model_type "
            f"{checkpoint.config.get('model_type')!r} is transformers' {type(model).__name__}; "
            "correct one of them"
        )
    layers = getattr(getattr(model, "model", None), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UsageError(
            f"{checkpoint.path}: {architecture} has no layers in {PREFIX}; "
            "wanted a decoder-only architecture such as LlamaForCausalLM"
        )
    separate_experts(layers, torch.float32)
    joined = next((name for name, value in layers.named_parameters() if value.dim() > 2), None)
    if joined is not None:
        raise UsageError(
            f"{checkpoint.path}: transformers holds the experts of {PREFIX}.{joined} in one tensor, and how "
            f"{architecture} stores them is not known here; wanted MixtralForCausalLM, Qwen3MoeForCausalLM "
            "or a dense model"
        )
    return model


def _from_config(checkpoint: Checkpoint) -> Any:
    try:
        config = AutoConfig.from_pretrained(checkpoint.path)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = False  # for a loss of training, out of routers that do not run here
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except Exception as error:  # what a wrong value in a config raises depends on who trips over it
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{checkpoint.path}: transformers knows no such decoder ({type(error).__name__}: {reason}); "
            "correct config.json"
        ) from error


def check_stored(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Hold a dense checkpoint to its skeleton: no tensor unknown, missing, misshapen or of another dtype.

    A tensor that the model ties to a stored one may be missing. Raises QtoolError naming the tensor.
    """
    wanted = model.state_dict(keep_vars=True)  # which tells the tied ones apart
    for name in checkpoint:
        if name not in wanted and not name.endswith(COMPUTED):
            raise QtoolError(
                f"{checkpoint.path}: holds {name}, which {checkpoint.architecture} does not have as "
                "config.json describes it; correct config.json or fetch the checkpoint again"
            )
    tied = {id(wanted[name]) for name in wanted if name in checkpoint}
    for name, tensor in wanted.items():
        if name in checkpoint:
            _check_tensor(checkpoint, name, list(tensor.shape))
        elif id(tensor) not in tied:
            raise QtoolError(
                f"{checkpoint.path}: holds no tensor {name}, which {checkpoint.architecture} has as "
                "config.json describes it; correct config.json or fetch the checkpoint again"
            )


def _check_tensor(checkpoint: Checkpoint, name: str, shape: list[int]) -> None:
    stored, dtype = list(checkpoint.shape(name)), checkpoint.dtype(name)
    if stored != shape:
        raise QtoolError(f"{checkpoint.path}: {name}: has shape {stored}, wanted {shape} as config.json says")
    if dtype not in _DTYPES:
        raise QtoolError(
            f"{checkpoint.path}: {name}: is stored as {dtype}, wanted {', '.join(_DTYPES)}; "
            "convert the checkpoint"
        )
