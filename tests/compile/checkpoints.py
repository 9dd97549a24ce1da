"""Seeded checkpoints of every family, and quantized ones, with shapes that are odd on purpose."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from qtool.core.formats import compressed_tensors
from qtool.core.qtensor import QuantizedTensor
from qtool.core.schemes import IntScheme, LinearScheme

SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 5.0, 7.0, 11.0, 13.0],
}
YARN = {"rope_type": "yarn", "rope_theta": 3e4, "factor": 8.0, "original_max_position_embeddings": 64}

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, head_dim=32, tie_word_embeddings=True),
    "llama-bias": LlamaConfig(
        **SHAPE, head_dim=16, attention_bias=True, mlp_bias=True, rope_parameters=LINEAR
    ),
    "llama3": LlamaConfig(**SHAPE, head_dim=48, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SHAPE, head_dim=16, sliding_window=21),
    "mistral-full": MistralConfig(**SHAPE, head_dim=16, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=40, max_window_layers=1),
    "qwen2-yarn": Qwen2Config(**SHAPE, rope_parameters=YARN),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=True),
    "phi3": Phi3Config(**SHAPE, pad_token_id=0, sliding_window=21),
    "phi4-mini": Phi3Config(
        **SHAPE, pad_token_id=0, original_max_position_embeddings=160, rope_parameters=LONGROPE
    ),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=5, num_experts_per_tok=2),
    "qwen3-moe": Qwen3MoeConfig(
        **SHAPE,
        head_dim=32,
        moe_intermediate_size=48,
        num_experts=7,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3-moe-sparse": Qwen3MoeConfig(
        **SHAPE,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
    ),
    "gemma3": Gemma3TextConfig(
        **SHAPE,
        head_dim=32,
        query_pre_attn_scalar=24,
        sliding_window=21,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
            "full_attention": LINEAR,
        },
    ),
}


def write_family(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A checkpoint of the family."""
    return write_model(FAMILIES[name], folder, dtype)


@torch.no_grad()
def write_model(config: PretrainedConfig, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A seeded checkpoint; norms and biases, which start as ones and zeros, are made random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
    model.to(dtype).save_pretrained(folder)
    return folder


def round_to(weight: torch.Tensor, scheme: IntScheme, scale_dtype: torch.dtype) -> QuantizedTensor:
    """Round to nearest: enough to have codes of every kind."""
    groups = weight.float().view(len(weight), scheme.num_groups(weight.shape[1]), -1)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if scheme.symmetric:
        scale = (torch.maximum(-low, high) / scheme.high).to(scale_dtype)
        zero_point = torch.zeros_like(scale)
    else:
        scale = ((high - low) / (scheme.high - scheme.low)).to(scale_dtype)
        zero_point = (scheme.low - low / scale.float()).round().clamp(scheme.low, scheme.high)
    codes = (groups / scale.float()[..., None] + zero_point[..., None]).round().clamp(scheme.low, scheme.high)
    return QuantizedTensor(
        codes.view_as(weight).to(torch.int8),
        scale,
        None if scheme.symmetric else zero_point.to(torch.int8),
        scheme,
    )


def write_quantized(
    source: Path,
    folder: Path,
    schemes: dict[str, IntScheme],
    scale_dtype: torch.dtype = torch.float32,
) -> Path:
    """A copy of a checkpoint whose linears are quantized when a part of their name is in `schemes`."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    chosen, dense = {}, []
    for name in [name for name in tensors if re.search(r"(_proj|\.w[123])\.weight$", name)]:
        module = name.removesuffix(".weight")
        scheme = next((scheme for part, scheme in schemes.items() if part in module), None)
        if scheme is None:
            dense.append(module)
            continue
        chosen[module] = LinearScheme(scheme)
        tensors |= compressed_tensors.encode(module, round_to(tensors.pop(name), scheme, scale_dtype))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config=compressed_tensors.config(chosen, [*dense, "lm_head"]))
    return folder


def edit_config(folder: Path, **changes: object) -> Path:
    """Change fields of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder
