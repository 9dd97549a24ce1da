"""Draft heads that others published: which tensors of theirs are which of ours.

- SafeAILab's EAGLE: a Llama ``config.json`` of one layer (with ``bias`` for the fusion) beside
  ``model.safetensors`` or ``pytorch_model.bin``. EAGLE-1 and 2 hold ``fc``, ``layers.0.*`` and perhaps
  ``embed_tokens``, and use the target's output matrix. EAGLE-3 holds ``midlayer.*``, ``fc`` over three hidden
  states, ``norm``, ``lm_head`` over ``draft_vocab_size`` tokens and ``d2t``: what has to be added to each
  of them to make it the target's.
- speculators (vLLM): ``speculators_model_type`` is ``eagle`` (``fusion_fc``, ``transformer.*`` and, with
  ``layernorms``, norms of embeddings and output) or ``eagle3`` (as above, ``layers.0`` for ``midlayer``).
- FasterDecoding's Medusa: ``medusa_num_heads`` and ``medusa_num_layers`` in ``config.json`` beside
  ``medusa_lm_head.safetensors`` or ``.pt``: of head k, blocks ``k.b.linear`` and the output ``k.B``.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from qtool.compile.heads.config import WANTED, HeadConfig
from qtool.compile.heads.head import LM_HEAD, TOKENS, Head, every_token, read_tensors
from qtool.compile.hidden import FINAL, HiddenLayer, eagle3_layers
from qtool.core.records import read_json
from qtool.errors import QtoolError, UsageError

_FILES = ("model.safetensors", "pytorch_model.bin", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
_LAYER_FIELDS = (
    "attention_bias",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "vocab_size",
)
"""Of a published config: what says how the layer computes."""
_RENAMED = (
    (r"^midlayer\.", "layers.0."),
    (r"^transformer\.", "layers.0."),
    (r"^fusion_fc\.", "fc."),
    (r"^embedding_layernorm\.", "embedding_norm."),
    (r"^pre_lm_head_layernorm\.", "norm."),
    (r"^(\d+)\.(\d+)\.linear\.", r"heads.\1.\2."),
)
_UNUSED = re.compile(r"^(t2d|verifier.*|.*rotary_emb\.inv_freq)$")


def read_published(folder: Path, num_layers: int | None = None) -> Head:
    """A head in one of these layouts; what it shares with its target may be missing still.

    `num_layers` are the target's, for EAGLE-3's choice of hidden states where the config does not say it.
    Raises UsageError for a layout that is none of them, QtoolError for one that lacks a part.
    """
    config = read_json(folder / "config.json")
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise UsageError(f"{folder}: holds none of {', '.join(_FILES)}; {WANTED}")
    tensors = _load(file)
    if "medusa_num_heads" in config:
        return _medusa(folder, config, tensors)
    named = {_ours(name): tensor for name, tensor in tensors.items() if not _UNUSED.match(name)}
    if "fc.weight" not in named:
        raise UsageError(f"{file}: has no fc, and config.json no medusa_num_heads; {WANTED}")
    return _eagle(folder, config, named, num_layers)


def _load(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        return read_tensors(file)
    try:
        loaded: dict[str, Tensor] = torch.load(file, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, UnpicklingError) as error:
        raise QtoolError(f"{file}: is damaged ({error}); fetch the head again") from error
    return loaded


def _ours(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def _eagle(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor], num_layers: int | None
) -> Head:
    published = config.get("transformer_layer_config", config)
    layer = {name: published[name] for name in _LAYER_FIELDS if published.get(name) is not None}
    layer["architectures"] = ["LlamaForCausalLM"]
    is_third = "layers.0.hidden_norm.weight" in tensors
    size, vocab = int(published["hidden_size"]), int(published["vocab_size"])
    if is_third and config.get("target_hidden_size") not in (None, size):
        raise QtoolError(
            f"{folder}: reads hidden states of {config['target_hidden_size']} features with a layer of "
            f"{size}; heads of another width than their target are not supported"
        )
    if "d2t" in tensors:
        offsets = tensors.pop("d2t")
        tensors[TOKENS] = (torch.arange(len(offsets)) + offsets).to(torch.int32)
    else:
        tensors[TOKENS] = every_token(vocab)
    layers: tuple[HiddenLayer, ...] = (FINAL,)
    if is_third:
        layers = _layers_read(folder, config, num_layers)
    head = HeadConfig(
        kind="eagle3" if is_third else "eagle",
        hidden_size=size,
        vocab_size=vocab,
        draft_vocab_size=len(tensors[TOKENS]),
        hidden_layers=layers,
        layer=layer,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
    )
    return Head(head, tensors)


def _layers_read(folder: Path, config: Mapping[str, Any], num_layers: int | None) -> tuple[int, ...]:
    """EAGLE-3's hidden layers: those that the config names, else the published choice."""
    inner = config.get("eagle_config") or {}
    named = config.get("eagle_aux_hidden_state_layer_ids") or inner.get("eagle_aux_hidden_state_layer_ids")
    if named:
        return tuple(int(layer) for layer in named)
    if num_layers is None:
        raise UsageError(
            f"{folder}: does not say which hidden states it reads, and they depend on its target; "
            "compile it with its target: qtool compile CHECKPOINT --draft"
        )
    return eagle3_layers(num_layers)


def _medusa(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Head:
    heads, blocks = int(config["medusa_num_heads"]), int(config.get("medusa_num_layers", 1))
    found = {}
    for name, tensor in tensors.items():
        output = re.match(rf"^(\d+)\.{blocks}\.weight$", name)
        found[f"heads.{output[1]}.lm_head.weight" if output else _ours(name)] = tensor
    first = found.get("heads.0.lm_head.weight", found.get(LM_HEAD))
    if first is None:
        raise QtoolError(f"{folder}: has no output matrix for head 0; fetch the head again")
    vocab, hidden = first.shape
    found[TOKENS] = every_token(vocab)
    head = HeadConfig(
        kind="medusa",
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        num_heads=heads,
        num_blocks=blocks,
    )
    return Head(head, found)
