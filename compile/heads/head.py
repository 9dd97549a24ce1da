"""A draft head with its weights: read from a folder, held to its config, written again."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.compile.config import DecoderConfig, read_config
from qtool.compile.decoder import EMBEDDING
from qtool.compile.decoder import HEAD as OUTPUT
from qtool.compile.heads.config import HEAD_CONFIG, WANTED, HeadConfig, read_head_config, refuse_file
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.core.qtensor import Linear
from qtool.errors import QtoolError, UsageError

WEIGHTS = "head.safetensors"
EMBED, LM_HEAD, TOKENS = "embed_tokens.weight", "lm_head.weight", "draft_tokens"


@dataclass(frozen=True)
class Head:
    """A head's config and tensors, by the names of `shapes`; ``draft_tokens`` says which token of the target
    each of its own is."""

    config: HeadConfig
    tensors: Mapping[str, Tensor]

    def tensor(self, name: str) -> Tensor:
        """A tensor; QtoolError when the head lacks it."""
        if name not in self.tensors:
            raise QtoolError(
                f"the head has no {name} of its own; compile it with the checkpoint that it was made for, "
                "where it is taken from: qtool compile CHECKPOINT --draft"
            )
        return self.tensors[name]

    def has(self, name: str) -> bool:
        """Whether the head has a tensor of this name."""
        return name in self.tensors

    def linear(self, module: str) -> Linear:
        """A linear."""
        return Linear(self.tensor(f"{module}.weight"), self.tensors.get(f"{module}.bias"))

    def save(self, folder: Path) -> None:
        """Write ``head.json`` and ``head.safetensors`` into `folder`."""
        self.config.save(folder)
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """The tensors that a head of this config has, by name; biases and the norms of `optional` beside them."""
    hidden, vocab = config.hidden_size, (config.draft_vocab_size, config.hidden_size)
    common: dict[str, tuple[int, ...]] = {LM_HEAD: vocab, TOKENS: (config.draft_vocab_size,)}
    if config.kind == "medusa":
        blocks = [(head, block) for head in range(config.num_heads) for block in range(config.num_blocks)]
        return common | {f"heads.{head}.{block}.weight": (hidden, hidden) for head, block in blocks}
    layer = config.decoder()
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    inputs = 2 * hidden if config.kind == "eagle3" else hidden
    fused = hidden * (len(config.hidden_layers) if config.kind == "eagle3" else 2)
    own = {"hidden_norm", "input_layernorm"} if config.kind == "eagle3" else set()
    return common | {
        EMBED: (config.vocab_size, hidden),
        "fc.weight": (hidden, fused),
        "layers.0.self_attn.q_proj.weight": (queries, inputs),
        "layers.0.self_attn.k_proj.weight": (keys, inputs),
        "layers.0.self_attn.v_proj.weight": (keys, inputs),
        "layers.0.self_attn.o_proj.weight": (hidden, queries),
        "layers.0.mlp.gate_proj.weight": (layer.intermediate_size, hidden),
        "layers.0.mlp.up_proj.weight": (layer.intermediate_size, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, layer.intermediate_size),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        **{f"layers.0.{name}.weight": (hidden,) for name in sorted(own)},
        **({"norm.weight": (hidden,)} if config.kind == "eagle3" else {}),
    }


def optional(config: HeadConfig) -> frozenset[str]:
    """Norms of EAGLE-1 that only some heads have (those of speculators with ``layernorms``), and Medusa's own
    output matrices."""
    if config.kind == "medusa":
        return frozenset(f"heads.{head}.lm_head.weight" for head in range(config.num_heads))
    if config.kind == "eagle":
        return frozenset({"embedding_norm.weight", "layers.0.input_layernorm.weight", "norm.weight"})
    return frozenset()


def check(head: Head, where: str) -> Head:
    """The head, whose tensors are those that its config promises; QtoolError names the first that is not."""
    wanted, allowed = shapes(head.config), optional(head.config)
    if head.config.kind == "medusa" and allowed <= head.tensors.keys():
        del wanted[LM_HEAD]
    for name, shape in wanted.items():
        found = tuple(head.tensor(name).shape)
        if found != shape:
            raise QtoolError(f"{where}: {name} has shape {found}, its config says {shape}")
    for name in head.tensors.keys() - wanted.keys() - allowed:
        if not (name.endswith(".bias") and f"{name.removesuffix('bias')}weight" in wanted):
            raise QtoolError(
                f"{where}: holds {name}, which has no place in a head of kind {head.config.kind}"
            )
    for name, tensor in head.tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise QtoolError(f"{where}: {name} holds NaN or infinity; train or fetch the head again")
    tokens = head.tensor(TOKENS)
    if int(tokens.min()) < 0 or int(tokens.max()) >= head.config.vocab_size:
        raise QtoolError(f"{where}: proposes tokens that a vocabulary of {head.config.vocab_size} lacks")
    return head


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a head's safetensors file; QtoolError when it is missing or damaged."""
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except OSError as error:
        raise QtoolError(f"{file}: cannot be read ({error}); train or fetch the head again") from error
    except SafetensorError as error:
        raise QtoolError(
            f"{file}: is truncated or no safetensors file ({error}); train or fetch the head again"
        ) from error
    return tensors


def read_head(folder: Path, checkpoint: Path | None = None) -> Head:
    """Read a head that qtool trained, or one in a published layout (see `published`).

    What heads share with their target, embeddings and the output matrix, comes from `checkpoint` where the
    folder lacks it. Raises UsageError when the folder holds no head, QtoolError for a damaged one.
    """
    from qtool.compile.heads.published import read_published

    refuse_file(folder)
    if (folder / HEAD_CONFIG).is_file():
        head = Head(read_head_config(folder), read_tensors(folder / WEIGHTS))
    elif (folder / "config.json").is_file():
        head = read_published(folder, None if checkpoint is None else _target(checkpoint)[1].num_layers)
    else:
        raise UsageError(f"{folder}: holds neither {HEAD_CONFIG} nor config.json; {WANTED}")
    if checkpoint is not None:
        head = complete(head, checkpoint)
    return check(head, str(folder))


def complete(head: Head, checkpoint: Path) -> Head:
    """The head with embeddings and output matrix of its target where it has none of its own."""
    source, config = _target(checkpoint)
    if (config.hidden_size, config.vocab_size) != (head.config.hidden_size, head.config.vocab_size):
        raise UsageError(
            f"{checkpoint}: has {config.hidden_size} features and {config.vocab_size} tokens, the head was "
            f"made for {head.config.hidden_size} and {head.config.vocab_size}; name the model it was made for"
        )
    weights = CheckpointWeights(config, source)
    tensors = dict(head.tensors)
    if EMBED not in tensors and head.config.kind != "medusa":
        tensors[EMBED] = weights.tensor(f"{EMBEDDING}.weight")
    if LM_HEAD not in tensors and "heads.0.lm_head.weight" not in tensors:
        output = weights.tensor(f"{EMBEDDING}.weight") if config.tied else weights.linear(OUTPUT).dense()
        tensors[LM_HEAD] = output[tensors[TOKENS].long()]
    return Head(head.config, tensors)


def _target(checkpoint: Path) -> tuple[Checkpoint, DecoderConfig]:
    source = Checkpoint(checkpoint)
    return source, read_config(source.config, str(checkpoint / "config.json"))


def every_token(count: int) -> Tensor:
    """The ``draft_tokens`` of a head that can propose all of them."""
    return torch.arange(count, dtype=torch.int32)
