"""What became of drafts, by sequence and over all, by drafter and kind of draft."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from qtool.runtime.request import SequenceState
from qtool.runtime.speculation.contract import Draft
from qtool.runtime.speculation.decide import CAUTIOUS, GUESS_WEIGHT, Acceptance

_MEMORY = 100
_OWN_MEMORY = 12
_COMMON_WEIGHT = 6.0
"""Drafts of its own that make a sequence's rate count as much as all sequences', where drafts have to be made
to be judged: a lucky few would start what does not pay, and an unlucky few end what does. N-grams are judged
at every step, and texts differ far more in them."""

Key = tuple[str, int]
"""A drafter's name and the kind of its draft."""


@dataclass
class _Shadow:
    """A draft that is not verified: its tokens are compared with those that the sequence gets.

    Another one is made when this one is judged, as if it had been verified. A draft at every token would say
    too much good of itself: where text is copied, most tokens stand in the middle of what is copied.
    """

    start: int
    draft: Draft
    key: Key
    num_judged: int = 0
    """Of its tokens, those that what the sequence got has been compared with."""


@dataclass
class _Record:
    """What is known of one sequence."""

    acceptance: dict[Key, Acceptance] = field(
        default_factory=lambda: defaultdict(lambda: Acceptance(_OWN_MEMORY))
    )
    shadow: _Shadow | None = None


class Records:
    """Acceptance as it was found, which says what drafts to come should bring."""

    def __init__(self) -> None:
        self._overall: dict[Key, Acceptance] = {}
        self._records: dict[int, _Record] = {}

    def rates(self, key: Key, guess: float, sequence: SequenceState, count: int) -> list[float]:
        """The chances that the first `count` tokens asked for are accepted; `guess` is the first one's as
        long as none was tried."""
        own = self._record(sequence).acceptance.get(key)
        overall = self._overall.setdefault(key, Acceptance(_MEMORY, guess)).rates(count)
        if own is None:
            return overall
        return own.rates(count, overall, GUESS_WEIGHT if guess == CAUTIOUS else _COMMON_WEIGHT)

    def num_made(self, key: Key, count: int) -> float:
        """Of `count` tokens asked for, how many are made and verified."""
        overall = self._overall.get(key)
        return count if overall is None else overall.num_made(count)

    def judge(self, sequence: SequenceState, key: Key, draft: Draft, path: Sequence[int]) -> None:
        """Take in which tokens of a draft were accepted."""
        overall = self._overall.setdefault(key, Acceptance(_MEMORY, CAUTIOUS))
        for acceptance in (overall, self._record(sequence).acceptance[key]):
            acceptance.update(len(draft), path, draft.num_considered)

    def cast_shadow(self, sequence: SequenceState, key: Key, draft: Draft) -> None:
        """Follow a draft that is not verified, if it is a chain that was not drawn, and none is followed."""
        record = self._record(sequence)
        if record.shadow is None and draft.parents is None and draft.probs is None:
            record.shadow = _Shadow(len(sequence.tokens), draft, key)

    def drop_shadow(self, sequence: SequenceState) -> None:
        """Follow none: the same drafter's draft is verified."""
        self._record(sequence).shadow = None

    def follow(self, sequence: SequenceState) -> None:
        """Judge the sequence's shadow as far as its tokens are known."""
        record = self._records.get(sequence.id)
        if record is not None and record.shadow is not None:
            record.shadow = self._followed(record.shadow, record, sequence.tokens)

    def forget(self, sequence: SequenceState) -> None:
        """The sequence is gone; what it taught over all stays."""
        self._records.pop(sequence.id, None)

    def _followed(self, shadow: _Shadow, record: _Record, tokens: Sequence[int]) -> _Shadow | None:
        """The shadow as far as it is judged; None when that is to its end."""
        draft = shadow.draft
        acceptances = self._overall[shadow.key], record.acceptance[shadow.key]
        for place in range(shadow.num_judged, min(len(draft), len(tokens) - shadow.start)):
            right = draft.tokens[place] == tokens[shadow.start + place]
            for acceptance in acceptances:
                for judged in [place] if right else range(place, len(draft)):
                    acceptance.note(judged, right)
            if not right:
                return None
        shadow.num_judged = len(tokens) - shadow.start
        return shadow if shadow.num_judged < len(draft) else None

    def _record(self, sequence: SequenceState) -> _Record:
        return self._records.setdefault(sequence.id, _Record())
