"""Writes answers of /v1/completions and /v1/chat/completions."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from qtool.errors import QtoolError
from qtool.runtime.client import Piece
from qtool.runtime.server.choices import Choice
from qtool.runtime.server.errors import error_object
from qtool.runtime.server.responses import DONE, Envelope, Json, Usage, event


@dataclass
class ChoicesWriter:
    """An answer that is a list of choices."""

    envelope: Envelope
    choices: Sequence[Choice]
    """By the index of pieces."""
    usage: Usage
    choices_per_prompt: int
    counts_tokens: bool = True
    """Whether what is generated is shown, and so counted."""
    _begun: set[int] = field(default_factory=set)

    def opening(self) -> Sequence[str]:
        return self._chunks([part for choice in self.choices for part in choice.opening()])

    def push(self, piece: Piece) -> Sequence[str]:
        self.usage.completion_tokens += self.counts_tokens
        if piece.index % self.choices_per_prompt == 0 and piece.index not in self._begun:
            self._begun.add(piece.index)
            self.usage.cached_tokens += piece.num_cached_tokens
        if piece.num_accepted_drafts or piece.num_rejected_drafts:
            self.usage.drafts[piece.index] = piece.num_accepted_drafts, piece.num_rejected_drafts
        return self._chunks(self.choices[piece.index].push(piece))

    def closing(self) -> Sequence[str]:
        usage = [event(self.envelope.closing(self.usage))] if self.envelope.include_usage else []
        return [*usage, DONE]

    def failing(self, error: QtoolError) -> Sequence[str]:
        return [event(error_object(str(error), 500)), DONE]

    def whole(self) -> Json:
        return self.envelope.whole([choice.whole() for choice in self.choices], self.usage)

    def _chunks(self, choices: Sequence[Json]) -> Sequence[str]:
        return [event(self.envelope.chunk(choice, self.usage)) for choice in choices]
