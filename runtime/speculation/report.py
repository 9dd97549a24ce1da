"""What speculation would bring on somebody's own prompts: acceptance by drafter and K, speedups, advice."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np

from qtool.runtime.engines.contract import Engine
from qtool.runtime.request import SamplingParams
from qtool.runtime.speculation.contract import Drafter
from qtool.runtime.speculation.decide import StepTimes
from qtool.runtime.speculation.measure import Measured, serve_all
from qtool.runtime.speculation.speculator import Speculator

OFF = "off"
_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12)
_WORTHWHILE = 1.03


@dataclass(frozen=True)
class Setting:
    """A drafter with drafts of one length, as it should do."""

    num_tokens: int
    acceptance_length: float
    """Tokens that a step with a draft gives."""
    tokens_per_step: float
    """Over all steps: some have no draft."""
    expected: dict[int, float]
    """Speedups, by batch size."""


@dataclass(frozen=True)
class Speedup:
    """How many times as fast a token came as without, measured several times."""

    median: float
    lowest: float
    highest: float


@dataclass(frozen=True)
class DrafterReport:
    """What one way to draft brings."""

    name: str
    rates: list[float]
    """Of the longest drafts, the share that was accepted, by place."""
    draft_share: float
    """Of a sequence's steps, how many had a draft to verify."""
    drafting_ms: float
    """For each token of a draft's length."""
    settings: list[Setting]
    measured: dict[int, Speedup]
    """With the number decided at each step, by batch size."""
    answers_differ: int
    """Greedy answers that were others than without drafts: ties that kernels break by the rows of a step."""


@dataclass(frozen=True)
class Report:
    """All of it."""

    num_prompts: int
    step_ms: dict[int, float]
    """Milliseconds of a step, by its rows."""
    plain_tokens_per_second: dict[int, float]
    """Without speculation, by batch size."""
    drafters: list[DrafterReport]
    recommendation: str
    """A drafter's name, or off."""


def make_report(
    engine: Engine,
    times: StepTimes,
    drafters: Mapping[str, Sequence[Drafter]],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    batches: Sequence[int],
    repeats: int,
    advance: Callable[[], None],
) -> Report:
    """Serve the prompts by every way to draft and at every batch size, with and without in turn, `repeats`
    times with.

    What is expected goes by `times`, which stay as they are.

    `drafters` are those that work together under a name. `advance` is called after each of the
    `num_runs` runs.
    """

    def serve(speculator: Speculator | None, batch: int) -> Measured:
        measured = serve_all(engine, speculator, prompts, params, batch)
        advance()
        return measured

    plain = {batch: serve(None, batch) for batch in batches}
    reports = []
    for name, together in drafters.items():
        longest = max(drafter.max_tokens for drafter in together)
        vocab_size = engine.vocab_size
        fixed = serve(Speculator(together, None, vocab_size, num_tokens=longest), 1)
        auto = Speculator(together, deepcopy(times), vocab_size)
        speedups = {}
        for batch in batches:
            found, before = [], plain[batch]
            for _ in range(repeats):
                drafted, after = serve(auto, batch), serve(None, batch)
                without = (before.mean_tpot_ms + after.mean_tpot_ms) / 2
                found.append(without / drafted.mean_tpot_ms)
                before = after
            speedups[batch] = Speedup(statistics.median(found), min(found), max(found))
        differing = sum(a != b for a, b in zip(fixed.answers, plain[batches[0]].answers, strict=True))
        reports.append(_drafter_report(name, longest, fixed, times, speedups, differing))
    rows = [1, 2, 4, 8, 16, 32, 64]
    step_ms = times.predict_ms(np.array(rows, np.float64), np.zeros(len(rows))).tolist()
    return Report(
        num_prompts=len(prompts),
        step_ms=dict(zip(rows, step_ms, strict=True)),
        plain_tokens_per_second={
            batch: 1000 * batch / max(found.mean_tpot_ms, 1e-9) for batch, found in plain.items()
        },
        drafters=reports,
        recommendation=recommend(reports),
    )


def num_runs(num_drafters: int, num_batches: int, repeats: int) -> int:
    """How often the prompts are served for a report."""
    return num_batches + num_drafters * (1 + 2 * num_batches * repeats)


def recommend(reports: Sequence[DrafterReport]) -> str:
    """The way to draft that was fastest, by the geometric mean over the batch sizes; off when none gained,
    or none in the worst of its measurements."""
    best, speedup = OFF, _WORTHWHILE
    for report in reports:
        found = statistics.geometric_mean(one.median for one in report.measured.values())
        worst = statistics.geometric_mean(one.lowest for one in report.measured.values())
        if found > speedup and worst > 1:
            best, speedup = report.name, found
    return best


def _drafter_report(
    name: str,
    longest: int,
    fixed: Measured,
    times: StepTimes,
    measured: dict[int, Speedup],
    differing: int,
) -> DrafterReport:
    num_tokens = sum(length.drafted for length in fixed.lengths)
    drafting_ms = 1000 * fixed.drafting_seconds / max(num_tokens, 1)
    rates, share = fixed.rates(), fixed.draft_share
    num_drafts = max(sum(length.drafted > 0 for length in fixed.lengths), 1)
    settings = []
    for length in (length for length in _LENGTHS if length <= longest):
        rows, gained = (sum(counts[:length]) / num_drafts for counts in (fixed.drafted, fixed.accepted))
        settings.append(
            Setting(
                length,
                1 + gained,
                1 + share * gained,
                {
                    batch: _expected(times, batch, share * rows, share * gained, share * rows * drafting_ms)
                    for batch in measured
                },
            )
        )
    return DrafterReport(name, rates, share, drafting_ms, settings, measured, differing)


def _expected(times: StepTimes, batch: int, drafted: float, gained: float, drafting_ms: float) -> float:
    """The speedup that drafts of so many tokens for each sequence should bring."""
    rows = np.array([batch, batch * (1 + drafted)], np.float64)
    plain, verifying = times.predict_ms(rows, np.zeros(2)).tolist()
    return float((1 + gained) * plain / (verifying + drafting_ms))
