"""Service-level objectives, and how much a step may do to keep them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from qtool.errors import UsageError
from qtool.runtime.request import SequenceState
from qtool.runtime.steptime import StepLoad, StepTimeModel

SloPolicy = Literal["queue", "reject"]

_HEADROOM = 0.9
"""Share of the objective that is planned with; the rest is for what the model does not foresee."""
_OUT_OF_REACH = 1.5
"""Times the step of a lone sequence that a step may take where the objective can't be kept."""
_MIN_CHUNK = 16
"""Tokens that a prompt's first chunk has at least: smaller ones cost more than they bring."""
_SECOND_MS = 1000.0


@dataclass(frozen=True)
class Slo:
    """What requests are promised. Raises UsageError for a value that is not above 0, or for no objective."""

    ttft_ms: float | None = None
    """Time to first token."""
    tpot_ms: float | None = None
    """Time per output token after the first, on average over an answer."""
    policy: SloPolicy = "queue"
    """Whether a request that can't have its first token in time waits all the same, or is refused."""

    def __post_init__(self) -> None:
        if self.ttft_ms is None and self.tpot_ms is None:
            raise UsageError("slo: names no objective; give ttft, tpot or both, as in ttft=500ms,tpot=50ms")
        for name, value in (("ttft", self.ttft_ms), ("tpot", self.tpot_ms)):
            if value is not None and not value > 0:
                raise UsageError(f"slo: {name} must be above 0, got {value}")
        if self.policy == "reject" and self.ttft_ms is None:
            raise UsageError("slo: the policy 'reject' goes by ttft, which is missing; add it")


def parse_slo(text: str, policy: SloPolicy = "queue") -> Slo:
    """Read objectives as in ``ttft=500ms,tpot=0.05s``. Raises UsageError for anything else."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(ttft|tpot)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", part)
        if match is None:
            raise UsageError(f"slo: {part!r} is no objective; write them as in ttft=500ms,tpot=50ms")
        name, number, unit = match.groups()
        if name in found:
            raise UsageError(f"slo: {name} is given twice; leave one out")
        found[name] = float(number) * (_SECOND_MS if unit == "s" else 1)
    return Slo(found.get("ttft"), found.get("tpot"), policy)


class Pacer:
    """Sizes chunks and the batch so that no step with a decoding sequence outlasts the TPOT objective."""

    def __init__(self, slo: Slo, model: StepTimeModel) -> None:
        self.slo = slo
        self.model = model
        self._length_share = 1.0
        """Of max_tokens, what recent answers took."""

    def chunk_limit(self, load: StepLoad, past: int, wanted: int) -> int:
        """The most tokens of a prompt, up to `wanted`, that a step may compute beside its load."""
        if self.slo.tpot_ms is None:
            return wanted
        low, high = 0, wanted
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits(load.plus(past, middle)):
                low = middle
            else:
                high = middle - 1
        return low

    def admits(self, running: Sequence[SequenceState], sequence: SequenceState, load: StepLoad) -> bool:
        """Whether one more sequence may run: a chunk of it fits beside a step's load, and all of them
        decoding, at the context that each has halfway, fit into a step."""
        if self.slo.tpot_ms is None or not running:
            return True
        chunk = min(sequence.num_uncomputed, _MIN_CHUNK)
        together = StepLoad()
        for one in (*running, sequence):
            halfway = one.num_prompt + self._expected_tokens(one) // 2
            together = together.plus(max(halfway, len(one.tokens)), 1)
        return self._fits(load.plus(0, chunk)) and self._fits(together)

    def expected_ttft_ms(
        self,
        num_prompt: int,
        running: Sequence[SequenceState],
        waiting: Sequence[SequenceState],
        max_num_seqs: int,
        max_tokens: int,
    ) -> float:
        """When a prompt that arrives now should have its first token.

        The prompts before it are computed in the largest chunks that fit beside what decodes, and where there
        is no place for it, enough of the running sequences end first.
        """
        decoding = [sequence for sequence in running if sequence.num_uncomputed == 1]
        load = StepLoad()
        for sequence in decoding:
            load = load.plus(sequence.num_computed, 1)
        prefilling = [sequence for sequence in running if sequence.num_uncomputed > 1]
        ahead = sum(sequence.num_uncomputed for sequence in (*prefilling, *waiting))
        room = max(max_tokens - len(decoding), 1)
        chunk = max(self.chunk_limit(load, 0, room) if decoding else room, 1)
        num_steps = -(-(ahead + num_prompt) // chunk)
        step_ms = self.model.predict_ms(load.plus(0, min(chunk, ahead + num_prompt)))
        first = num_steps * step_ms
        lacking = len(running) + len(waiting) + 1 - min(max_num_seqs, self._capacity(running))
        if lacking > 0 and running:
            left = sorted(max(self._expected_tokens(one) - one.num_generated, 1) for one in running)
            rounds, place = divmod(lacking - 1, len(left))
            own = -(-num_prompt // chunk) * step_ms
            first = max(first, (left[place] + rounds * left[-1]) * step_ms + own)
        return first

    def ended(self, sequence: SequenceState) -> None:
        """Learn how long answers are from one that ended."""
        share = sequence.num_generated / sequence.params.max_tokens
        self._length_share += 0.05 * (share - self._length_share)

    def _expected_tokens(self, sequence: SequenceState) -> int:
        return max(int(self._length_share * sequence.params.max_tokens), 1)

    def _capacity(self, running: Sequence[SequenceState]) -> int:
        """Sequences like the running ones that can decode together."""
        if self.slo.tpot_ms is None or not running:
            return 1_000_000
        context = sum(len(sequence.tokens) for sequence in running) // len(running)
        fixed = self.model.predict_ms(StepLoad())
        each = self.model.predict_ms(StepLoad().plus(context, 1)) - fixed
        return max(int((self._ceiling_ms(self.slo.tpot_ms) - fixed) / max(each, 1e-6)), 1)

    def _fits(self, load: StepLoad) -> bool:
        return self.slo.tpot_ms is None or self.model.predict_ms(load) <= self._ceiling_ms(self.slo.tpot_ms)

    def _ceiling_ms(self, tpot_ms: float) -> float:
        """What a step may take. An objective that a lone sequence misses is out of reach: one after the other
        would miss it too, and take far longer; so some share a step that takes little more."""
        alone = self.model.predict_ms(StepLoad().plus(0, 1))
        planned = _HEADROOM * tpot_ms
        return planned if alone <= planned else _OUT_OF_REACH * alone
