"""What the engine loop tells of its work, for metrics: plain data, times in seconds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qtool.runtime.request import FinishReason, SequenceState
from qtool.runtime.steptime import StepLoad


class DraftLength(NamedTuple):
    """What a sequence that decodes had of a step."""

    drafted: int
    """Tokens of its draft, 0 for none."""
    accepted: int
    """Of these, those that are in its answer now."""
    tokens: int
    """By which its answer is longer: one more than accepted, or as many where the last one ended it."""


@dataclass(frozen=True)
class SpeculationDone:
    """What a step drafted and verified."""

    drafting_seconds: float
    drafted: Sequence[int] = ()
    """By place in the draft, how many tokens were verified."""
    accepted: Sequence[int] = ()
    """Of these, how many were accepted."""
    lengths: Sequence[DraftLength] = ()
    """Of each sequence that decoded."""


@dataclass(frozen=True)
class StepDone:
    """A step was run and committed."""

    seconds: float
    """Scheduling, copying, running, sampling."""
    engine_seconds: float
    """Of these, in the engine."""
    load: StepLoad
    speculation: SpeculationDone | None = None
    """None without a speculator."""


@dataclass(frozen=True)
class SequenceDone:
    """A sequence got its last token."""

    request_id: int
    reason: FinishReason
    num_prompt: int
    num_cached: int
    num_generated: int
    queue_seconds: float
    """From arrival to its first step."""
    ttft_seconds: float
    """From arrival to the first token."""
    tpot_seconds: float | None
    """Between tokens, on average; None for an answer of one token."""
    total_seconds: float

    @classmethod
    def of(cls, sequence: SequenceState, reason: FinishReason, now: float) -> "SequenceDone":
        """The record of a sequence that ends now."""
        assert sequence.started is not None
        assert sequence.first_token is not None
        gaps = sequence.num_generated - 1
        return cls(
            request_id=sequence.id,
            reason=reason,
            num_prompt=sequence.num_prompt,
            num_cached=sequence.num_cached,
            num_generated=sequence.num_generated,
            queue_seconds=sequence.started - sequence.arrived,
            ttft_seconds=sequence.first_token - sequence.arrived,
            tpot_seconds=(now - sequence.first_token) / gaps if gaps else None,
            total_seconds=now - sequence.arrived,
        )


Event = StepDone | SequenceDone
Observer = Callable[[Event], None]
