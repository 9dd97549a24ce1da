"""Records → windows of tokens: drawn by a seed to calibrate on, in order to evaluate on."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AutoTokenizer

from qtool.calibrate.text import Record, digest, load_records
from qtool.core.checkpoint import Checkpoint
from qtool.core.recipe import Calibration
from qtool.errors import QtoolError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(checkpoint: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer beside a checkpoint; QtoolError when the folder has none that transformers can read."""
    try:
        return AutoTokenizer.from_pretrained(checkpoint)
    except (OSError, ValueError, KeyError) as error:
        raise QtoolError(f"{checkpoint}: holds no tokenizer that transformers can read ({error})") from error


def tokenize(tokenizer: "PreTrainedTokenizerBase", records: list[Record], chat_template: bool) -> Tensor:
    """The records' tokens, one record after another without special tokens between them, as int64 [T].

    With `chat_template` each record is rendered as a chat first (running text becomes a user's message);
    without, a chat is its messages' contents, a line each.
    """
    texts = [_render(tokenizer, record) if chat_template else _plain(record) for record in records]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in ids], dtype=torch.int64)


def _plain(record: Record) -> str:
    return record if isinstance(record, str) else "\n".join(turn["content"] for turn in record)


def _render(tokenizer: "PreTrainedTokenizerBase", record: Record) -> str:
    if tokenizer.chat_template is None:
        raise UsageError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template; "
            "set calibration.chat_template: false"
        )
    messages = [{"role": "user", "content": record}] if isinstance(record, str) else record
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def sample_windows(token_ids: Tensor, num_samples: int, seq_len: int, seed: int) -> Tensor:
    """Cut tokens [T] into windows of `seq_len` and draw `num_samples` of them: [num_samples, seq_len]."""
    windows = sequential_windows(token_ids, seq_len, num_samples, every=True)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    return windows[order[:num_samples].sort().values]


def sequential_windows(token_ids: Tensor, length: int, count: int, *, every: bool = False) -> Tensor:
    """The first `count` non-overlapping windows of tokens [T]: [count, length].

    `every` gives all the windows there are, at least `count`. Raises UsageError when there are fewer.
    """
    available = len(token_ids) // length
    if available < count:
        raise UsageError(
            f"the text has {len(token_ids)} tokens, which make {available} windows of {length}, "
            f"wanted {count}; use fewer or shorter windows, or more text"
        )
    count = available if every else count
    return token_ids[: count * length].view(count, length)


def calibration_windows(
    tokenizer: "PreTrainedTokenizerBase", records: list[Record], calibration: Calibration
) -> Tensor:
    """The windows [num_samples, seq_len] that a recipe's calibration asks for."""
    token_ids = tokenize(tokenizer, records, calibration.chat_template)
    try:
        return sample_windows(token_ids, calibration.num_samples, calibration.seq_len, calibration.seed)
    except UsageError as error:
        raise UsageError(f"{calibration.dataset}: {error}") from error


def recipe_windows(source: Checkpoint, calibration: Calibration) -> tuple[Tensor, str]:
    """The windows [num_samples, seq_len] of a checkpoint's tokens, and what tells their text from any other.

    Raises UsageError for windows that are longer than the model's positions, or more than the text holds.
    """
    longest = source.config.get("max_position_embeddings")
    if longest is not None and calibration.seq_len > longest:
        raise UsageError(
            f"calibration.seq_len {calibration.seq_len} is beyond the model's {longest} positions; lower it"
        )
    records = load_records(calibration.dataset)
    return calibration_windows(load_tokenizer(source.path), records, calibration), digest(records)


def check_vocabulary(windows: Tensor, vocab_size: int, model: Path) -> None:
    """Raise UsageError when windows hold a token that a model with `vocab_size` of them does not know.

    `model` is the folder whose tokenizer made them.
    """
    largest = int(windows.max())
    if largest >= vocab_size:
        raise UsageError(
            f"{model}: its tokenizer has {len(load_tokenizer(model))} tokens and its model {vocab_size}, and "
            f"the text holds token {largest}; use the tokenizer that the model was trained with"
        )
