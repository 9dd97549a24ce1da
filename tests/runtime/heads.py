"""Seeded draft heads for the tiny model: untrained, but their drafts depend on all that they read."""

from pathlib import Path

import torch

from qtool.compile.config import DecoderConfig, read_config
from qtool.compile.heads.config import HeadKind
from qtool.compile.heads.head import TOKENS, Head
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.runtime.speculation.training.start import HeadOptions, new_head


def opened(checkpoint: Path) -> tuple[DecoderConfig, CheckpointWeights]:
    source = Checkpoint(checkpoint)
    config = read_config(source.config, "config.json")
    return config, CheckpointWeights(config, source)


def seeded_head(checkpoint: Path, kind: HeadKind, *, num_tokens: int = 200) -> Head:
    """A head that can propose `num_tokens` of the tokens, with noise on all that is learned."""
    config, weights = opened(checkpoint)
    generator = torch.Generator().manual_seed(5)
    chosen = torch.randperm(config.vocab_size, generator=generator)[:num_tokens].sort().values
    head = new_head(HeadOptions(kind, num_heads=3), config, weights, chosen.to(torch.int32))
    tensors = {
        name: tensor
        if name == TOKENS or "embed" in name or "lm_head" in name
        else tensor.float() + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in head.tensors.items()
    }
    return Head(head.config, tensors)
