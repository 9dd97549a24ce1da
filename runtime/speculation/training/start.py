"""Where training begins: a head that borrows what it can from its target."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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

_DAMPING = 1 / 16
"""Of what feeds the matrices that start at zero. Adam moves all weights alike, and a last layer's inner
values are so large that its first steps would undo the fitted start."""

_DRAFT_VOCAB = 8192


@dataclass(frozen=True)
class HeadOptions:
    """What kind of head, and how large."""

    kind: HeadKind
    draft_vocab_size: int | None = None
    """Tokens that it can propose; None: 8192, or all of the target's if those are fewer."""
    num_heads: int = 4
    """Of Medusa."""


def draft_vocab_size(options: HeadOptions, vocab_size: int) -> int:
    """Tokens that a head can propose of the target's `vocab_size`. UsageError when more are asked for."""
    if options.draft_vocab_size is None:
        return min(_DRAFT_VOCAB, vocab_size)
    if options.draft_vocab_size > vocab_size:
        raise UsageError(
            f"--draft-vocab is {options.draft_vocab_size}, and the model has {vocab_size} tokens; give "
            f"{vocab_size} at most"
        )
    return options.draft_vocab_size


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
    for name in ("self_attn.v_proj", "mlp.up_proj"):
        tensors[f"layers.0.{name}.weight"] *= _DAMPING


_PENALTY = 1e-3
"""Of least squares, relative to the mean of the squares."""
_SHRINK = 20
"""A token's own mean counts as much as the fit for all tokens once it was seen so often."""
FIT_EPOCHS = 2
"""Times that `fit_start` goes through all batches."""


@torch.no_grad()
def fit_start(head: Head, alone: Tensor, epoch: Callable[[], Iterable[Batch]]) -> Head:
    """EAGLE-1 fitted to the target's next feature in closed form, a start that gradient descent would take
    hours for. Other heads as they are.

    The next feature is taken for a linear map of the last one, plus something of the token's own. The latter
    is a linear map of its embedding and of `alone` [V, hidden], the target's final hidden state after the
    token with no text of its own before it; then what the token's residuals have in common is added. The
    sum is a table, which takes the place of the embeddings. `epoch` gives all batches, anew each time.
    """
    if head.config.kind != "eagle":
        return head
    hidden, eps = head.config.hidden_size, head.config.decoder().rms_norm_eps
    table = head.tensor(EMBED).float()
    known = torch.cat([F.rms_norm(table, (hidden,), eps=eps), F.rms_norm(alone, (hidden,), eps=eps)], dim=-1)
    width = known.shape[1] + hidden
    gram, moment = torch.zeros(width, width), torch.zeros(width, hidden)
    for tokens, features, wanted in map(_pairs, epoch()):
        inputs = torch.cat([known[tokens], features], dim=-1)
        gram += inputs.T @ inputs
        moment += inputs.T @ wanted
    gram += _PENALTY * gram.diagonal().mean() * torch.eye(width)
    fitted = torch.linalg.solve(gram, moment)
    own, carried = known @ fitted[:-hidden], fitted[-hidden:]
    residuals, count = torch.zeros_like(own), torch.zeros(len(own), 1)
    for tokens, features, wanted in map(_pairs, epoch()):
        residuals.index_add_(0, tokens, wanted - own[tokens] - features @ carried)
        count.index_add_(0, tokens, torch.ones(len(tokens), 1))
    own += residuals / (count + _SHRINK)
    fusion = torch.cat([torch.eye(hidden), carried.T], dim=-1)
    return Head(head.config, {**head.tensors, EMBED: own, "fc.weight": fusion})


def _pairs(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Of each place: its token [n], the final feature before it [n, hidden], and its own [n, hidden]."""
    return batch.tokens[:, 1:].flatten(), batch.final[:, :-1].flatten(0, 1), batch.final[:, 1:].flatten(0, 1)
