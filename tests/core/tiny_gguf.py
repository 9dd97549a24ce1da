"""GGUF files made for tests: the tiny checkpoint written as one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from safetensors.numpy import load_file

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def write_gguf(
    checkpoint: Path,
    path: Path,
    *,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: dict[str, Any] | None = None,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """Write a Llama `checkpoint` as a GGUF file with matrices of `kind`.

    `metadata` and `extra` tensors are added, the GGUF names in `drop` left out.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, checkpoint)
    for key, value in (metadata or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(key, value)
    tensors = {
        _gguf_name(name): _rope_order(name, tensor, config)
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }
    for name, tensor in (tensors | (extra or {})).items():
        if name in drop:
            continue
        if tensor.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, checkpoint: Path) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index in special else 1 for index in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())


def _gguf_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, _, layer, module = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_NAMES[module]}.weight"


def _rope_order(name: str, tensor: np.ndarray[Any, Any], config: dict[str, Any]) -> np.ndarray[Any, Any]:
    """GGUF's Llama keeps the two values that rope turns together side by side, not half a head apart."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    module = name.removesuffix(".weight").rpartition(".")[2]
    if module not in heads:
        return tensor
    rows, columns = tensor.shape
    halves = tensor.reshape(config[heads[module]], 2, -1, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
