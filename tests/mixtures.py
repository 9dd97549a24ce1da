"""Mixtures of experts made for tests."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from tests.models import write_tokenizer

_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.3,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**_SHAPE, num_local_experts=3, num_experts_per_tok=2),
    "qwen3-moe": Qwen3MoeConfig(
        **{**_SHAPE, "num_hidden_layers": 3},
        moe_intermediate_size=32,
        num_experts=5,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
}
"""Odd numbers of experts; of the second, layer 1 is dense."""


@torch.no_grad()
def write_mixture(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A seeded checkpoint, its tokenizer beside it; norms, which start as ones, are random too."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for part, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.3)
        if part.endswith("mlp.gate.weight"):  # zeros in a new Qwen3-MoE
            parameter.normal_(std=0.3)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder, 320)
    return folder
