"""Readers of answers that may call tools, fed piece by piece."""

from collections.abc import Collection, Sequence

from qtool.runtime.tools.events import Content, Event, PlainText, ToolParser
from qtool.runtime.tools.formats import ToolFormat
from qtool.runtime.tools.json_calls import MalformedCallError, skip_whitespace

_CLOSING = frozenset("}]>")
"""Characters one of which ends every call: without one, a held text need not be read again."""


def make_parser(format_: ToolFormat | None, tools: Collection[str]) -> ToolParser:
    """A parser for one answer, with the names of the tools it may call; None is a chat without tools."""
    if format_ is None:
        return PlainText()
    return MarkedCalls(format_) if format_.marker else BareCalls(format_, frozenset(tools))


class MarkedCalls:
    """Calls that begin with a marker, in the midst of text.

    White space between two calls, or after the last, is layout and is left out. What looks like a call but
    can't be read is text, as it stands.
    """

    def __init__(self, format_: ToolFormat) -> None:
        self._format = format_
        self._held = ""
        self._inside = False
        """Whether the held text follows a marker."""
        self._follows_call = False

    def push(self, text: str) -> Sequence[Event]:
        """What the next piece of text completes."""
        self._held += text
        if self._inside and _CLOSING.isdisjoint(text):
            return []
        events: list[Event] = []
        while (event := self._next()) is not None:
            events += event
        return events

    def finish(self) -> Sequence[Event]:
        """What was held back, as text."""
        text = self._format.marker + self._held if self._inside else self._held
        self._held, self._inside = "", False
        return self._text(text)

    def _next(self) -> Sequence[Event] | None:
        """The events up to the next mark in the held text; None when more text is needed."""
        return self._read_call() if self._inside else self._read_text()

    def _read_text(self) -> Sequence[Event] | None:
        before, marker, after = self._held.partition(self._format.marker)
        if marker:
            self._held, self._inside = after, True
            return self._text(before)
        keep = _num_held(self._held, self._format.marker)
        safe = self._held[: len(self._held) - keep]
        if self._is_layout(safe):
            return None
        self._held = self._held[len(safe) :]
        return self._text(safe) or None

    def _read_call(self) -> Sequence[Event] | None:
        try:
            found = self._format.read(self._held)
        except MalformedCallError:
            self._inside = False
            return self._text(self._format.marker)
        if found is None:
            return None
        self._held, self._inside, self._follows_call = self._held[found.length :], False, True
        return found.calls

    def _text(self, text: str) -> list[Event]:
        if self._is_layout(text):
            return []
        self._follows_call = False
        return _content(text)

    def _is_layout(self, text: str) -> bool:
        return self._follows_call and not text.strip()


class BareCalls:
    """Answers that are nothing but calls, without a marker: JSON objects that name a known tool.

    An answer that begins otherwise is text, to its end. So is the rest from an object on that isn't a call.
    """

    def __init__(self, format_: ToolFormat, tools: frozenset[str]) -> None:
        self._format = format_
        self._tools = tools
        self._held = ""
        self._is_text = False
        self._called = False

    def push(self, text: str) -> Sequence[Event]:
        """What the next piece of text completes."""
        if self._is_text:
            return _content(text)
        self._held += text
        events: list[Event] = []
        while (event := self._next()) is not None:
            events += event
        return events

    def finish(self) -> Sequence[Event]:
        """What was held back, as text."""
        held, self._held = self._held, ""
        return [] if self._called and not held.strip() else _content(held)

    def _next(self) -> Sequence[Event] | None:
        start = self._start()
        if start is None:
            return None
        try:
            if self._held[start] != "{":
                raise MalformedCallError
            found = self._format.read(self._held[start:])
            if found is None:
                return None
            if not all(call.name in self._tools for call in found.calls):
                raise MalformedCallError
        except MalformedCallError:
            self._is_text = True
            text, self._held = self._held, ""
            return _content(text) or None
        self._held, self._called = self._held[start + found.length :], True
        return found.calls

    def _start(self) -> int | None:
        """Where the next object would begin; None while that can't be told."""
        opening = self._format.separator if self._called else self._format.prefix
        start = skip_whitespace(self._held, 0)
        if self._held.startswith(opening, start):
            start = skip_whitespace(self._held, start + len(opening))
        elif opening.startswith(self._held[start:]):
            return None
        return start if start < len(self._held) else None


def _content(text: str) -> list[Event]:
    return [Content(text)] if text else []


def _num_held(text: str, marker: str) -> int:
    """Length of the longest suffix of the text that begins the marker."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if marker.startswith(text[-length:])), 0)
