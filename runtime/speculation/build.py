"""From the words of an option to a speculator."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qtool.compile.engine import DRAFT_FOLDER, ENGINE, read_spec
from qtool.compile.heads.config import HEAD_CONFIG
from qtool.errors import UsageError
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Engine
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.speculation.contract import Drafter
from qtool.runtime.speculation.decide import StepTimes
from qtool.runtime.speculation.draft_model import DraftModel, refuse_other_vocabulary
from qtool.runtime.speculation.ngram import NgramDrafter
from qtool.runtime.speculation.speculator import Speculator
from qtool.runtime.sweep import measure_change_ms, measure_verify_times
from qtool.runtime.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_MOST_ROWS = 128
_MOST_WIDTH = 16
_WIDTH = 3
"""Of trees, where nothing else is asked for: with 1.9 to 2.2 tokens accepted a step, more brought nothing."""
_KINDS = "off, ngram, draft=PATH, heads=PATH or auto"

Kind = Literal["off", "ngram", "draft", "heads", "auto"]


@dataclass(frozen=True)
class SpeculationConfig:
    """How to speculate."""

    kind: Kind = "off"
    """auto is n-grams, and what the engine's folder has under `draft` as well."""
    path: Path | None = None
    """Of the draft model or the heads."""
    num_tokens: int | None = None
    """Tokens of every draft, no more than its drafter can make; None decides at each step, nothing
    included."""
    tree_width: int | None = None
    """Tokens that heads propose at each depth of a greedy or seeded draft; 1 is a chain. None is a tree where
    the engine takes one."""
    block_verification: bool = False
    """Whether the tokens of a drawn chain are accepted together rather than one by one."""
    store_tokens: int = 0
    """Tokens of recent answers, for each cache salt, that n-grams are looked up in too."""
    kv_cache_tokens: int | None = None
    """Of the draft model's pool; None is the target's."""
    threads: int | None = None
    """Of the draft model."""
    device: str | None = None
    """Of the draft model."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.kind in ("draft", "heads")):
            raise UsageError(f"speculative: is {self.kind} and path {self.path}; wanted {_KINDS}")
        if self.num_tokens is not None and self.num_tokens < 1:
            raise UsageError(f"speculative_tokens must be at least 1, got {self.num_tokens}")
        if self.tree_width is not None and not 1 <= self.tree_width <= _MOST_WIDTH:
            raise UsageError(
                f"speculative_tree is {self.tree_width}; wanted 1 to {_MOST_WIDTH}, or auto: heads are run "
                "for every token of a tree"
            )
        if self.store_tokens < 0:
            raise UsageError(f"store_tokens must be at least 0, got {self.store_tokens}")
        self._refuse_unused()

    def _refuse_unused(self) -> None:
        unused = {
            "speculative_tokens": (self.num_tokens is not None, ("ngram", "draft", "heads", "auto")),
            "block_verification": (self.block_verification, ("draft", "heads", "auto")),
            "speculative_tree": (self.tree_width is not None, ("heads", "auto")),
            "speculative_store": (self.store_tokens > 0, ("ngram", "auto")),
        }
        for option, (given, kinds) in unused.items():
            if given and self.kind not in kinds:
                raise UsageError(
                    f"{option}: changes nothing with speculative {self.kind}; wanted {' or '.join(kinds)}"
                )


def parse_kind(text: str) -> tuple[Kind, Path | None]:
    """Read what drafts: ``off``, ``ngram``, ``auto``, ``draft=PATH`` or ``heads=PATH``. UsageError for
    anything else."""
    kind, _, path = text.partition("=")
    match kind:
        case "off" | "ngram" | "auto" if not path:
            return kind, None
        case "draft" | "heads" if path:
            return kind, Path(path)
    raise UsageError(f"speculative: is {text!r}; wanted {_KINDS}")


def parse_count(option: str, text: str) -> int | None:
    """Read an option's number of tokens, or ``auto`` as None. UsageError for anything else."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{option}: is {text!r}; wanted a number of 1 or more, or auto")
    return int(text)


def make_speculator(
    config: SpeculationConfig, limits: SchedulerConfig, engine: Engine, tokenizer: Tokenizer, path: Path
) -> Speculator | None:
    """What drafts for an engine that was opened from `path`; None for off.

    Opens and times what drafts, and times the engine, where K is to be decided: nothing may be in its pool.
    """
    if config.kind == "off":
        return None
    times = None if config.num_tokens is not None else measure_times(engine, limits)
    drafters = make_drafters(config, engine, tokenizer, path, times)
    longest = max(drafter.max_tokens for drafter in drafters)
    if config.num_tokens is not None and config.num_tokens > longest:
        names = " and ".join(drafter.name for drafter in drafters)
        raise UsageError(
            f"speculative_tokens is {config.num_tokens}, and {names} can draft {longest} at most: the chance "
            f"that all before a token are accepted falls with every one; give 1 to {longest}, or auto"
        )
    return Speculator(
        drafters,
        times,
        engine.vocab_size,
        num_tokens=config.num_tokens,
        block_verification=config.block_verification,
    )


def measure_times(engine: Engine, limits: SchedulerConfig) -> StepTimes:
    """What steps of an engine take by their rows. Nothing may be in its pool."""
    sweep = measure_verify_times(engine, min(_MOST_ROWS, limits.max_num_batched_tokens))
    return StepTimes(sweep, measure_change_ms(engine))


def make_drafters(
    config: SpeculationConfig, engine: Engine, tokenizer: Tokenizer, path: Path, times: StepTimes | None
) -> list[Drafter]:
    """What drafts together, opened and timed. `times` are the engine's, None where K is fixed: heads leave
    out what is unlikely, but not where a step takes longer for having other rows than the last."""
    whole = times is None or times.prefers_alike
    if config.path is not None:
        return [_open(config.kind, config.path, config, engine, tokenizer, path, whole)]
    found: list[Drafter] = [NgramDrafter(store_tokens=config.store_tokens)]
    folder = path / DRAFT_FOLDER
    if config.kind == "auto" and folder.is_dir():
        kind: Kind = "heads" if (folder / HEAD_CONFIG).is_file() else "draft"
        found.append(_open(kind, folder, config, engine, tokenizer, path, whole))
    return found


def _open(
    kind: Kind,
    path: Path,
    config: SpeculationConfig,
    engine: Engine,
    tokenizer: Tokenizer,
    model: Path,
    whole: bool,
) -> Drafter:
    if kind == "heads":
        width = config.tree_width or (_WIDTH if engine.takes_trees else 1)
        if width > 1 and not engine.takes_trees:
            raise UsageError(
                f"speculative_tree is {width}, and this engine takes chains only; wanted 1 or auto"
            )
        from qtool.runtime.speculation.heads import open_heads, warn_of_another

        warn_of_another(path, model)
        drafter = open_heads(
            path,
            engine,
            width=width,
            whole=whole,
            device=config.device,
            threads=config.threads,
        )
        if drafter.name != "medusa" and _is_openvino(model) and not _is_openvino(path):
            _log.warning(
                "%s: is not compiled and runs in torch, several times slower than it could: qtool compile "
                "MODEL --target openvino --draft %s",
                path,
                path,
            )
        return drafter
    if (path / HEAD_CONFIG).is_file():
        raise UsageError(f"{path}: holds draft heads, no model; say heads={path}")
    refuse_other_vocabulary(tokenizer, path, engine.vocab_size)
    kv_cache_tokens = config.kv_cache_tokens or engine.num_blocks * engine.block_size
    draft = open_engine(path, kv_cache_tokens=kv_cache_tokens, threads=config.threads, device=config.device)
    times = StepTimes(measure_verify_times(draft, _MOST_ROWS), measure_change_ms(draft))
    return DraftModel(draft, times, engine.vocab_size)


def _is_openvino(folder: Path) -> bool:
    return (folder / ENGINE).is_file() and read_spec(folder).target == "openvino"
