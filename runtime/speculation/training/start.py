"""Where training begins: a head that borrows what it can from its target."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from qtool.compile.config import DecoderConfig
from qtool.compile.decoder import EMBEDDING, FINAL_NORM, Weights
from qtool.compile.decoder import HEAD as OUTPUT
from qtool.compile.heads.config import HeadConfig, HeadKind
from qtool.compile.heads.head import EMBED, LM_HEAD, TOKENS, Head, shapes
from qtool.compile.hidden import FINAL, HiddenLayer, eagle3_layers
from qtool.errors import UsageError
from qtool.runtime.speculation.training.network import Batch


@dataclass(frozen=True)
class HeadOptions:
    """What kind of head, and how large."""

    kind: HeadKind
    draft_vocab_size: int = 8192
    """Tokens that it can propose; all of the target's if that is fewer."""
    num_heads: int = 4
    """Of Medusa."""


def frequent_tokens(sequences: Iterable[Sequence[int]], count: int, vocab_size: int) -> Tensor:
    """The `count` tokens that the sequences hold most often, ascending, int32; filled up with low ids, which
    are common in vocabularies that were built by merging (FR-Spec, Zhao et al. 2025, section 4)."""
    seen = Counter(token for sequence in sequences for token in sequence)
    ranked = [token for token, _ in seen.most_common(count)]
    ranked += [token for token in range(vocab_size) if token not in seen][: count - len(ranked)]
    return torch.tensor(sorted(ranked), dtype=torch.int32)


def target_output(target: DecoderConfig, weights: Weights) -> Tensor:
    """The target's output matrix [V, hidden]."""
    if target.tied:
        return weights.tensor(f"{EMBEDDING}.weight").float()
    return weights.linear(OUTPUT).dense()


def layers_read(kind: HeadKind, target: DecoderConfig) -> tuple[HiddenLayer, ...]:
    """The hidden layers that a head of this kind reads."""
    return eagle3_layers(target.num_layers) if kind == "eagle3" else (FINAL,)


def new_head(options: HeadOptions, target: DecoderConfig, weights: Weights, tokens: Tensor) -> Head:
    """A head that is not trained yet, for the target's `tokens` [draft vocabulary].

    EAGLE's layer begins as the target's last one, but adds nothing yet; the output matrix has the target's
    rows. Raises UsageError for a target whose layers are of another kind than the head's.
    """
    config = HeadConfig(
        kind=options.kind,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=len(tokens),
        hidden_layers=layers_read(options.kind, target),
        num_heads=options.num_heads if options.kind == "medusa" else 0,
        layer={} if options.kind == "medusa" else _layer(target),
    )
    tensors = {name: torch.zeros(shape) for name, shape in shapes(config).items()}
    tensors[TOKENS] = tokens
    tensors[LM_HEAD] = target_output(target, weights)[tokens.long()]
    if options.kind == "medusa":
        names = [name for name in tensors if name.startswith("heads.")]
        biases = {name.replace(".weight", ".bias"): torch.zeros(target.hidden_size) for name in names}
        return Head(config, tensors | biases)
    tensors[EMBED] = weights.tensor(f"{EMBEDDING}.weight")
    _copy_last_layer(config, target, weights, tensors)
    return Head(config, tensors)


def _layer(target: DecoderConfig) -> dict[str, object]:
    """A Llama layer of the target's shape."""
    rope = target.ropes[-1]
    if target.activation != "silu":
        raise UsageError(f"an EAGLE layer computes with silu, {target.architecture} with {target.activation}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": target.activation,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "max_position_embeddings": target.max_context,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": rope.theta,
        "vocab_size": target.vocab_size,
    }


def _copy_last_layer(
    config: HeadConfig, target: DecoderConfig, weights: Weights, tensors: dict[str, Tensor]
) -> None:
    prefix, hidden = f"model.layers.{target.num_layers - 1}", config.hidden_size
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = weights.linear(f"{prefix}.self_attn.{name}").dense()
        tensors[f"layers.0.self_attn.{name}.weight"][:, -weight.shape[1] :] = weight
    if target.mixtures[-1] is None:
        for name in ("gate_proj", "up_proj"):
            tensors[f"layers.0.mlp.{name}.weight"] = weights.linear(f"{prefix}.mlp.{name}").dense()
    tensors["layers.0.post_attention_layernorm.weight"] = weights.tensor(
        f"{prefix}.post_attention_layernorm.weight"
    )
    tensors["fc.weight"][:, -hidden:] = torch.eye(hidden)
    tensors["layers.0.input_layernorm.weight"] = torch.ones(hidden)
    if config.kind == "eagle3":
        for name in (
            "o_proj",
            "down_proj",
        ):  # what it adds is all that the head learns: it may begin with some
            part = "self_attn" if name == "o_proj" else "mlp"
            tensors[f"layers.0.{part}.{name}.weight"] = weights.linear(f"{prefix}.{part}.{name}").dense()
        tensors["layers.0.hidden_norm.weight"] = weights.tensor(f"{prefix}.input_layernorm.weight")
        tensors["norm.weight"] = weights.tensor(f"{FINAL_NORM}.weight")
        return
    # embeddings are small beside features: a norm brings both to one scale, and least squares to one penalty
    tensors["embedding_norm.weight"] = torch.ones(hidden)


_PENALTY = 1e-3
"""Of least squares, relative to the mean of the squares."""


@torch.no_grad()
def fit_fusion(head: Head, batches: Iterable[Batch]) -> Head:
    """EAGLE-1 with its `fc` fitted by least squares to the target's next feature: a start in closed form,
    which gradient descent would take hours for. Other heads as they are."""
    if head.config.kind != "eagle":
        return head
    table, eps = head.tensor(EMBED).float(), head.config.decoder().rms_norm_eps
    width = 2 * head.config.hidden_size
    gram, moment = torch.zeros(width, width), torch.zeros(width, head.config.hidden_size)
    for batch in batches:
        tokens = F.rms_norm(table[batch.tokens[:, 1:]], table.shape[1:], eps=eps)
        inputs = torch.cat([tokens, batch.features[:, :-1]], dim=-1).flatten(0, 1)
        gram += inputs.T @ inputs
        moment += inputs.T @ batch.final[:, 1:].flatten(0, 1)
    gram += _PENALTY * gram.diagonal().mean() * torch.eye(width)
    fitted = torch.linalg.solve(gram, moment).T
    return Head(head.config, {**head.tensors, "fc.weight": fitted})
