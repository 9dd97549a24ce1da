"""What an answer that may call tools consists of, in order. Whole answers and streams are both made of these,
so that they can't differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True)
class ToolCall:
    """One complete call of a tool."""

    name: str
    arguments: str
    """A JSON object, as the model wrote it."""


Event = Content | ToolCall


class ToolParser(Protocol):
    """Reads one answer piece by piece. How the text is cut into pieces changes nothing but the cuts of
    Content: a call is passed on when it is whole."""

    def push(self, text: str) -> Sequence[Event]:
        """What the next piece of text completes."""
        ...

    def finish(self) -> Sequence[Event]:
        """What was held back, when the answer ends: a call that is not whole is text."""
        ...


class PlainText:
    """The parser of answers that call no tools."""

    def push(self, text: str) -> Sequence[Event]:
        """The text itself."""
        return [Content(text)] if text else []

    def finish(self) -> Sequence[Event]:
        """Nothing is held back."""
        return []
