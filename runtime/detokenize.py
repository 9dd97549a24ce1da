"""Tokens to text while they arrive: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_CONTEXT = 6


class Decoder(Protocol):
    """What turns token ids into text, without special tokens."""

    def decode(self, ids: Sequence[int]) -> str: ...


class Detokenizer:
    """Text of a sequence's new tokens, piece by piece; the pieces joined are the whole text.

    Tokens are decoded together with the few before them, the prompt's last ones included, since a decoder
    treats the first token of what it is given in its own way (SentencePiece drops its leading space). A
    character split over tokens is held until it is whole.
    """

    def __init__(self, decoder: Decoder, prompt: Sequence[int]) -> None:
        self._decoder = decoder
        self._window = list(prompt[-_CONTEXT:])
        """The tokens of the last piece, as context, then those that gave no text yet."""
        self._num_context = len(self._window)
        # A prompt may end within a character: its bytes belong to the text that completes it.
        self._context = decoder.decode(self._window).rstrip(_REPLACEMENT)

    def push(self, token: int) -> str:
        """The text that one more token completes."""
        self._window.append(token)
        text = self._decoder.decode(self._window)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._context):
            return ""
        piece = text[len(self._context) :]
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._context = self._decoder.decode(self._window)
        return piece

    def finish(self) -> str:
        """What is held when the sequence ends: an incomplete character, as U+FFFD."""
        return self._decoder.decode(self._window)[len(self._context) :]


class StopMatcher:
    """Passes text on up to the first stop string, and holds back what could still become one.

    The stop string that is complete first wins, the longest of them on a tie, so that the outcome does not
    depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """The text that is safe to show; `matched` is set when a stop string is complete."""
        text = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, shown after all since the text ends here."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix of the text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """A sequence's text: detokenized, and ended by its stop strings.

    A stop string counts only in what follows the text of the first `min_tokens` tokens.
    """

    def __init__(
        self, decoder: Decoder, prompt: Sequence[int], stops: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._detokenizer = Detokenizer(decoder, prompt)
        self._matcher = StopMatcher(stops)
        self._num_unmatched = min_tokens

    @property
    def stopped(self) -> bool:
        """Whether a stop string is complete; nothing may be pushed afterwards."""
        return self._matcher.matched is not None

    def push(self, token: int) -> str:
        """The text to show for one more token."""
        text = self._detokenizer.push(token)
        if self._num_unmatched > 0:
            self._num_unmatched -= 1
            return text
        return self._matcher.push(text)

    def finish(self) -> str:
        """The text to show when the sequence ends without a stop string."""
        text = self._matcher.push(self._detokenizer.finish())
        return text if self.stopped else text + self._matcher.finish()
