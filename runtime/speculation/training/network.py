"""Draft heads as trainable modules, and what each loses on a batch of the target's own sequences."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qtool.compile.backends.reference import Tokens
from qtool.compile.heads.config import HeadConfig
from qtool.compile.heads.eagle import draft
from qtool.compile.heads.head import EMBED, LM_HEAD, TOKENS, Head
from qtool.compile.heads.reference import DraftTraining, Unrolled
from qtool.core.qtensor import Linear

_DECAY = 0.8
"""What a draft counts beside the one before it, which has to be accepted first."""
_FEATURE_WEIGHT = 0.2
"""Of EAGLE-1's regression of features, beside the cross entropy (the paper weighs them 10 to 1 with a loss a
feature; here both are means)."""


@dataclass(frozen=True)
class Batch:
    """Sequences of one length and what the target made of them."""

    tokens: Tensor
    """[B, S]"""
    features: Tensor
    """[B, S, width], the hidden layers that the head reads."""
    final: Tensor
    """[B, S, hidden], the final hidden states."""
    counted: Tensor
    """[B, S], the tokens after which drafts are wanted: all but those of prompts."""

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device."""
        return Batch(
            self.tokens.to(device), self.features.to(device), self.final.to(device), self.counted.to(device)
        )


class Network(nn.Module):
    """A head under training. Embeddings stay as they are; so does Medusa's output matrix, which its heads
    share, and EAGLE's begins as the target's."""

    def __init__(
        self, config: HeadConfig, tensors: Mapping[str, Tensor], target_output: Tensor, device: torch.device
    ) -> None:
        """`target_output` is the target's output matrix [V, hidden], float32."""
        super().__init__()
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        target_output = target_output.to(device)
        self.config = config
        frozen = {EMBED, TOKENS, LM_HEAD} if config.kind == "medusa" else {EMBED, TOKENS}
        self._learned = {
            name: nn.Parameter(tensor.float()) for name, tensor in tensors.items() if name not in frozen
        }
        for name, parameter in self._learned.items():
            self.register_parameter(name.replace(".", "/"), parameter)
        fixed = {name: tensors[name] for name in frozen & tensors.keys()}
        self._fixed = {
            name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in fixed.items()
        }
        self._target_output = target_output
        self._own_output = target_output[tensors[TOKENS].long()]

    def head(self) -> Head:
        """What is trained, as it is now."""
        tensors = {name: parameter.detach().half().cpu() for name, parameter in self._learned.items()}
        fixed = {
            name: (value.half() if value.is_floating_point() else value).cpu()
            for name, value in self._fixed.items()
        }
        return Head(self.config, {**fixed, **tensors})

    def choices(self, batch: Batch) -> Tensor:
        """The token that a greedy target says after each, [B, S]."""
        return F.linear(batch.final, self._target_output).argmax(-1)

    def tensor(self, name: str) -> Tensor:
        return self._learned[name] if name in self._learned else self._fixed[name]

    def has(self, name: str) -> bool:
        return name in self._learned or name in self._fixed

    def linear(self, module: str) -> Linear:
        return Linear(self.tensor(f"{module}.weight"), self._learned.get(f"{module}.bias"))

    def predictions(self, batch: Batch, depth: int) -> list[tuple[Tensor, Tensor | None]]:
        """For each draft d < `depth`: logits [B, S - 2 - d, draft vocabulary] of token i + 2 + d for rows i,
        and EAGLE's features of token i + 1 + d."""
        if self.config.kind == "medusa":
            return [(self._medusa(batch.final[:, : -2 - k], k), None) for k in range(depth)]
        return self._eagle(batch, depth)

    def targets(self, batch: Batch, depth: int) -> list[Tensor]:
        """For each draft: the target's distribution [B, S - 2 - d, draft vocabulary] over head's tokens."""
        logits = F.linear(batch.final, self._own_output)
        return [logits[:, 1 + d : -1].float().softmax(dim=-1) for d in range(depth)]

    def loss(self, batch: Batch, depth: int) -> Tensor:
        """Cross entropy with the target's distributions, later drafts counting less; EAGLE-1's features
        too."""
        with torch.no_grad():
            targets = self.targets(batch, depth)
        total, weight = batch.final.new_zeros(()), 0.0
        for d, ((logits, feature), target) in enumerate(
            zip(self.predictions(batch, depth), targets, strict=True)
        ):
            counted = batch.counted[:, 1 : -1 - d]
            loss = -(target * logits.float().log_softmax(dim=-1)).sum(-1)
            if self.config.kind == "eagle" and feature is not None:
                wanted = batch.final[:, 1 + d : -1]
                loss = loss + _FEATURE_WEIGHT * F.smooth_l1_loss(
                    feature.float(), wanted, reduction="none"
                ).mean(-1)
            loss = (loss * counted).sum() / counted.sum().clamp(min=1)
            total, weight = total + _DECAY**d * loss, weight + _DECAY**d
        return total / weight

    def _medusa(self, hidden: Tensor, k: int) -> Tensor:
        for block in range(self.config.num_blocks):
            linear = self.linear(f"heads.{k}.{block}")
            hidden = hidden + F.silu(F.linear(hidden, linear.dense(), linear.bias))
        return F.linear(hidden, self.tensor(LM_HEAD))

    def _eagle(self, batch: Batch, depth: int) -> list[tuple[Tensor, Tensor | None]]:
        count, length = batch.tokens.shape
        rows = length - 2  # row i has the feature of token i, and token i + 1; it drafts token i + 2 first
        features = batch.features[:, :rows]
        if self.config.kind == "eagle3":
            features = F.linear(features, self.tensor("fc.weight"), self._learned.get("fc.bias"))
        past = Unrolled()
        results: list[tuple[Tensor, Tensor | None]] = []
        device = batch.tokens.device
        every = torch.arange(count * rows, device=device)
        for d in range(depth):
            ahead = torch.arange(rows, device=device) + 1 + d
            tokens = batch.tokens[:, ahead.clamp(max=length - 1)]
            step = Tokens(tokens.reshape(-1), ahead.repeat(count), every, every)
            ops = DraftTraining(step, count, features.reshape(count * rows, -1), past)
            drafted = draft(self.config, self, ops)
            features = drafted.hidden[0].view(count, rows, -1)
            known = rows - d
            results.append((drafted.logits.view(count, rows, -1)[:, :known], features[:, :known]))
        return results


@torch.no_grad()
def acceptance(network: Network, batches: Iterable[Batch], depth: int) -> list[float]:
    """Of each draft, the share that a greedy target would accept where it accepted those before, in running
    text and in answers.

    The drafts are held to the target's own choice given the text before them, which is what the target says
    at every accepted place.
    """
    tried, accepted = [0] * depth, [0] * depth
    for batch in batches:
        head = network.tensor(TOKENS).long()
        choices = network.choices(batch)
        reached = batch.counted[:, 1:-1]
        for d, (logits, _) in enumerate(network.predictions(batch, depth)):
            drafts = head[logits.argmax(-1)]
            reached = reached[:, : drafts.shape[1]]
            tried[d] += int(reached.sum())
            # the text has to be what the target would have said for the next draft to be asked for it
            hit = reached & (drafts == choices[:, 1 + d : -1])
            accepted[d] += int(hit.sum())
            reached = hit & (drafts == batch.tokens[:, 2 + d :])
    return [hit / max(count, 1) for hit, count in zip(accepted, tried, strict=True)]
