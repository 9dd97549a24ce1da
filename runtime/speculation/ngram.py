"""Drafts that are copied from text: what followed the sequence's last tokens where they stood before."""

from collections import OrderedDict
from collections.abc import Sequence

from qtool.runtime.request import SequenceState
from qtool.runtime.speculation.contract import EMPTY, Draft, DraftRequest, Seen

MAX_TOKENS = 12
_SHORTEST = 2
_LONGEST = 5
_SHORTEST_ELSEWHERE = 3
"""A match in other requests' text says less."""
_SALTS = 64
"""Stores that are kept, the last used ones."""
_ELSEWHERE = 100
"""Added to the kind of drafts from the store."""


class NgramIndex:
    """Where each run of two to five tokens stood last in a text that grows."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}
        self._num_indexed = 0
        """Leading tokens whose runs, up to the one that ends with them, are known."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what the text has become, but for its last token, which nothing follows yet."""
        end = len(tokens) - 1
        for place in range(self._num_indexed, end):
            for size in range(_SHORTEST, min(_LONGEST, place + 1) + 1):
                self._places[tuple(tokens[place + 1 - size : place + 1])] = place + 1
        self._num_indexed = max(end, self._num_indexed)

    def find(self, tail: Sequence[int]) -> tuple[int, int] | None:
        """Where the text goes on after the longest run that ends `tail`, and that run's length."""
        for size in range(min(_LONGEST, len(tail)), _SHORTEST - 1, -1):
            place = self._places.get(tuple(tail[len(tail) - size :]))
            if place is not None:
                return place, size
        return None


class OutputStore:
    """Recent answers, to draft from for other requests of the same salt: two halves, the older is dropped
    when the newer is full."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens` is what it holds at most."""
        self._half = num_tokens // 2
        self._halves: list[tuple[list[int], NgramIndex]] = [([], NgramIndex())]

    def add(self, tokens: Sequence[int]) -> None:
        """Keep an answer."""
        text, index = self._halves[0]
        if len(text) + len(tokens) > self._half and text:
            text, index = [], NgramIndex()
            self._halves = [(text, index), self._halves[0]]
        text += tokens[: self._half]
        index.extend(text)

    def find(self, tail: Sequence[int], num_tokens: int) -> tuple[list[int], int]:
        """What followed the longest run that ends `tail`, and the run's length; nothing and 0 for none."""
        best: tuple[list[int], int] = [], 0
        for text, index in self._halves:
            found = index.find(tail)
            if found is not None and found[1] > max(best[1], _SHORTEST_ELSEWHERE - 1):
                best = text[found[0] : found[0] + num_tokens], found[1]
        return best


class NgramDrafter:
    """Prompt lookup (Saxena 2023; LLMA, Yang et al. 2023): deterministic, and free beside a step.

    A request's own text is searched first, then, with a store, the answers of recent requests. What repeats
    with a period is continued past its end. The kind of a draft is the length of the run that was found.
    """

    name = "ngram"
    wants_hidden = False

    def __init__(self, max_tokens: int = MAX_TOKENS, store_tokens: int = 0) -> None:
        """`store_tokens` is how many tokens of others' answers are kept for each cache salt; 0 is none."""
        self.max_tokens = max_tokens
        self._store_tokens = store_tokens
        self._indexes: dict[int, NgramIndex] = {}
        self._stores: OrderedDict[str, OutputStore] = OrderedDict()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """What followed the last tokens before."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        sequence, count = request.sequence, min(request.num_tokens, self.max_tokens)
        tokens = sequence.tokens
        index = self._indexes.setdefault(sequence.id, NgramIndex())
        index.extend(tokens)
        tail = tokens[-_LONGEST:]
        found = index.find(tail)
        if self._store_tokens and (found is None or found[1] < _LONGEST):
            store = self._stores.get(sequence.options.cache_salt)
            copied, size = ([], 0) if store is None else store.find(tail, count)
            if copied and (found is None or size > found[1]):
                return Draft(copied, kind=_ELSEWHERE + size)
        if found is None:
            return EMPTY
        start, size = found
        period = len(tokens) - start
        return Draft([tokens[start + place % period] for place in range(count)], kind=size)

    def expected_ms(self, requests: Sequence[DraftRequest]) -> float:
        """Some microseconds: nothing."""
        return 0.0

    def observe(self, seen: Sequence[Seen]) -> None:
        """Tokens are read when drafts are wanted."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """No block matters."""

    def preempted(self, sequence: SequenceState) -> None:
        """The text is still the same."""

    def forget(self, sequence: SequenceState) -> None:
        """Drop the index; the answer goes to the store."""
        self._indexes.pop(sequence.id, None)
        if not self._store_tokens or not sequence.num_generated:
            return
        salt = sequence.options.cache_salt
        store = self._stores.setdefault(salt, OutputStore(self._store_tokens))
        self._stores.move_to_end(salt)
        if len(self._stores) > _SALTS:
            self._stores.popitem(last=False)
        store.add(sequence.tokens[sequence.num_prompt :])
