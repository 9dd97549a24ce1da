"""The training loop: steps over batches, saved as it goes, so that a run that was killed goes on."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from qtool.compile.heads.config import HeadKind
from qtool.compile.heads.head import Head
from qtool.core.kept import drop, has_kept, keep
from qtool.errors import QtoolError, UsageError
from qtool.runtime.speculation.training.batches import Batches, watched
from qtool.runtime.speculation.training.network import Batch, Network, acceptance

Told = Callable[[str, int, int, str], None]
"""Is told what goes on, how many of its steps are done, of how many, and a word on it."""

_STATE = re.compile(r"training-\d{8}\.pt")
_WARM_UP = 30
"""Steps in which the learning rate rises."""
_LAST_SHARE = 0.1
"""Of the learning rate, at the end."""
_RATES: dict[HeadKind, float] = {"medusa": 1e-3, "eagle": 3e-4, "eagle3": 1e-3}
_FITTED_SHARE = 0.3
"""Of the learning rate, for what starts from something good: the target's output matrix, and in EAGLE-1's
`fc` the best linear fit."""
_KEPT = 0.97
"""Of the mean loss, at each step."""
_MOST_EPOCHS = 10_000
_CLIP = 0.5
"""Of the gradient's norm, as EAGLE's own training."""


@dataclass(frozen=True)
class TrainOptions:
    """How to train."""

    epochs: float = 2.0
    batch_size: int = 4
    """Sequences."""
    depth: int = 3
    """Drafts that are unrolled; of Medusa its heads."""
    learning_rate: float | None = None
    """The highest; None is what suits the kind."""
    save_every: int = 50
    """Steps."""

    def __post_init__(self) -> None:
        if not 0 < self.epochs <= _MOST_EPOCHS:
            raise UsageError(f"epochs: is {self.epochs:g}; wanted more than 0 and at most {_MOST_EPOCHS}")


class TrainReport(BaseModel):
    """What came of a training."""

    model_config = ConfigDict(frozen=True)

    steps: int
    loss: float
    """Mean of the last steps."""
    start_acceptance: tuple[float, ...]
    """As `acceptance`, before the first step."""
    acceptance: tuple[float, ...]
    """Of each draft in a chain: how often a greedy target accepts it, given that it accepted those before.
    On sequences that were not learned from."""

    @property
    def acceptance_length(self) -> float:
        """Tokens of a step on average, the target's own included, when a chain of all drafts is verified."""
        return mean_length(self.acceptance)


def mean_length(rates: Sequence[float]) -> float:
    """Tokens of a step on average whose drafts are accepted with these conditional rates."""
    total, reached = 1.0, 1.0
    for rate in rates:
        reached *= rate
        total += reached
    return total


def train(
    head: Head,
    target_output: Tensor,
    batches: Batches,
    options: TrainOptions,
    folder: Path,
    told: Told,
    device: torch.device,
) -> tuple[Head, TrainReport]:
    """Train a head; what comes of it is the same bytes whether or not the run was interrupted.

    `target_output` is the target's output matrix [V, hidden]. State is kept in `folder`. `told` is called
    after each step, with the loss, and after each batch of sequences that are judged.
    """
    network = Network(head.config, head.tensors, target_output, device)
    held_out = [batch.to(device) for batch in batches.load(batches.held_out)]
    optimizer = torch.optim.AdamW(_groups(network, options), betas=(0.9, 0.95), weight_decay=0.0)
    rates = [group["lr"] for group in optimizer.param_groups]
    total = max(1, round(options.epochs * batches.num_batches))
    step, loss, before = _resume(folder, network, optimizer)
    if step == 0:
        before = _judge("judging the start", network, held_out, options.depth, told)
    for batch in _from(batches, step, total):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * _schedule(step, total)
        with torch.autocast(device.type, torch.bfloat16, enabled=_multiplies_bfloat16(device)):
            value = network.loss(batch.to(device), options.depth)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(network.parameters(), _CLIP)
        optimizer.step()
        step += 1
        lost = value.item()
        if not math.isfinite(lost):
            raise _diverged(step, folder, rates)
        loss = _KEPT * loss + (1 - _KEPT) * lost
        told("training", step, total, f"loss {_mean(loss, step):.3f}")
        if step % options.save_every == 0:
            _save(folder, network, optimizer, step, loss, before)
    report = TrainReport(
        steps=step,
        loss=_mean(loss, step),
        start_acceptance=before,
        acceptance=_judge("judging the heads", network, held_out, options.depth, told),
    )
    trained = network.head()
    if not all(bool(tensor.isfinite().all()) for tensor in trained.tensors.values()):
        raise _diverged(step, folder, rates)
    return trained, report


def _judge(
    part: str, network: Network, held_out: Sequence[Batch], depth: int, told: Told
) -> tuple[float, ...]:
    """The `acceptance` on batches that are not learned from."""
    done = count(1)
    batches = watched(held_out, lambda: told(part, next(done), len(held_out), ""))
    return tuple(acceptance(network, batches, depth))


def _diverged(step: int, folder: Path, rates: Sequence[float]) -> QtoolError:
    return QtoolError(
        f"training diverged: at step {step} the loss or a weight is NaN, infinite or beyond float16. Remove "
        f"{folder} and start anew with a --learning-rate below {max(rates):g}"
    )


def _multiplies_bfloat16(device: torch.device) -> bool:
    """Whether a device has instructions for products of bfloat16, which halve the time of a step."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    known = torch.cpu.get_capabilities()
    return bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def _mean(average: float, steps: int) -> float:
    """An average that began at 0, corrected for that as Adam's moments are (Kingma and Ba 2015)."""
    return average / (1 - _KEPT**steps)


def _groups(network: Network, options: TrainOptions) -> list[dict[str, object]]:
    """Parameters by learning rate."""
    kind = network.config.kind
    rate = _RATES[kind] if options.learning_rate is None else options.learning_rate
    begun = ("lm_head/", "fc/") if kind == "eagle" else ("lm_head/",)
    fitted = [value for name, value in network.named_parameters() if name.startswith(begun)]
    chosen = set(map(id, fitted))
    free = [value for value in network.parameters() if id(value) not in chosen]
    groups: list[dict[str, object]] = [{"params": free, "lr": rate}]
    return [*groups, {"params": fitted, "lr": _FITTED_SHARE * rate}] if fitted else groups


def _from(batches: Batches, step: int, total: int) -> Iterator[Batch]:
    """The batches of steps `step` … `total` - 1."""
    first, done = divmod(step, batches.num_batches)
    epochs = range(first, -(-total // batches.num_batches))
    places = list(chain.from_iterable(batches.epoch(number) for number in epochs))
    return batches.load(places[done : done + total - step])


def _schedule(step: int, total: int) -> float:
    """A short rise, then half a cosine down."""
    rise = min(1.0, (step + 1) / _WARM_UP)
    return rise * (_LAST_SHARE + (1 - _LAST_SHARE) * (1 + math.cos(math.pi * step / total)) / 2)


def _save(
    folder: Path,
    network: Network,
    optimizer: torch.optim.Optimizer,
    step: int,
    loss: float,
    before: tuple[float, ...],
) -> None:
    state = {
        "network": network.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "loss": loss,
        "before": before,
    }
    older = saved_states(folder)
    temporary = folder / "training.partial"
    torch.save(state, temporary)
    keep(temporary, folder / f"training-{step:08}.pt")
    for file in older:
        drop(file)


def saved_states(folder: Path) -> list[Path]:
    """The files of saved states, from the earliest step on."""
    return sorted(file for file in folder.iterdir() if _STATE.fullmatch(file.name))


def _resume(
    folder: Path, network: Network, optimizer: torch.optim.Optimizer
) -> tuple[int, float, tuple[float, ...]]:
    """Take up saved state: the steps done, the average loss as it is kept, and the acceptance before them."""
    saved = next(filter(has_kept, reversed(saved_states(folder))), None)
    if saved is None:
        return 0, 0.0, ()
    state = torch.load(saved, weights_only=True, map_location="cpu")
    network.load_state_dict(state["network"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["loss"], tuple(state["before"])
