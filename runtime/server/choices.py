"""The choices of an answer, written while their pieces come. A stream sends what each piece adds, and a whole
answer is all of it together, so that they can't differ."""

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from qtool.runtime.client import Piece
from qtool.runtime.server.responses import Json
from qtool.runtime.server.token_logprobs import Bytes, CompletionLogprobs, chat_entry, merged
from qtool.runtime.tools.events import Content, Event, ToolParser

_ID_LETTERS = string.ascii_letters + string.digits


class Choice(Protocol):
    """One choice, in the dialect of its endpoint."""

    def opening(self) -> Sequence[Json]:
        """Choices of the chunks that come before any piece."""
        ...

    def push(self, piece: Piece) -> Sequence[Json]:
        """Choices of the chunks that a piece makes: none while it holds nothing."""
        ...

    def whole(self) -> Json:
        """All pieces together."""
        ...


@dataclass
class CompletionChoice:
    """A choice of /v1/completions."""

    index: int
    prompt: Sequence[int]
    echoed: str | None
    """The prompt's text, when the answer begins with it."""
    only_prompt: bool
    """Whether what is generated is dropped."""
    logprobs: CompletionLogprobs | None
    stop_token_ids: frozenset[int]
    _text: str = ""
    _finish_reason: str | None = None
    _written: list[Json] = field(default_factory=list)
    _pending: list[Json] = field(default_factory=list)
    """Log-probabilities of tokens whose text is held back."""

    def opening(self) -> Sequence[Json]:
        return []

    def push(self, piece: Piece) -> Sequence[Json]:
        text = "" if self.only_prompt else piece.text
        if self._is_first and self.echoed is not None:
            text = self.echoed + text
            if self.logprobs is not None and piece.prompt_logprobs is not None:
                self._pending.append(self.logprobs.rows(self.prompt, piece.prompt_logprobs))
        self._is_first = False
        if self.logprobs is not None and piece.logprobs is not None and self._shows(piece.token):
            self._pending.append(self.logprobs.rows([piece.token], [piece.logprobs]))
        if not text and piece.finish_reason is None:
            return []
        logprobs = merged(self._pending)
        self._written += self._pending
        self._pending.clear()
        self._text += text
        self._finish_reason = piece.finish_reason
        return [self._choice(text, logprobs, piece.finish_reason)]

    def whole(self) -> Json:
        return self._choice(self._text, merged(self._written), self._finish_reason)

    _is_first: bool = True

    def _shows(self, token: int) -> bool:
        return not self.only_prompt and token not in self.stop_token_ids

    def _choice(self, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


@dataclass
class ChatChoice:
    """A choice of /v1/chat/completions."""

    index: int
    parser: ToolParser
    token_bytes: Bytes
    stop_token_ids: frozenset[int]
    max_calls: int | None = None
    """Calls beyond it are left out."""
    id_length: int = 24
    """Of the ids of calls."""
    _content: str = ""
    _calls: list[Json] = field(default_factory=list)
    _finish_reason: str | None = None
    _written: list[Json] = field(default_factory=list)
    _pending: list[Json] = field(default_factory=list)
    """Log-probabilities of tokens whose text is held back."""
    _has_logprobs: bool = False

    def opening(self) -> Sequence[Json]:
        return [self._chunk({"role": "assistant", "content": "", "refusal": None}, None)]

    def push(self, piece: Piece) -> Sequence[Json]:
        if piece.logprobs is not None:
            self._has_logprobs = True
            if piece.token not in self.stop_token_ids:
                self._pending.append(chat_entry(piece.logprobs, self.token_bytes))
        events = list(self.parser.push(piece.text))
        if piece.finish_reason is not None:
            events += self.parser.finish()
        deltas = [delta for event in events if (delta := self._take(event)) is not None]
        chunks = [self._chunk(delta, None) for delta in deltas]
        if piece.finish_reason is not None:
            called = self._calls and piece.finish_reason == "stop"
            self._finish_reason = "tool_calls" if called else piece.finish_reason
            chunks.append(self._chunk({}, self._finish_reason))
        return chunks

    def whole(self) -> Json:
        content = None if self._calls and not self._content else self._content
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if self._calls:
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"} for call in self._calls
            ]
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(self._written),
            "finish_reason": self._finish_reason,
        }

    def _take(self, event: Event) -> Json | None:
        """The delta of an event."""
        if isinstance(event, Content):
            self._content += event.text
            return {"content": event.text}
        if len(self._calls) == self.max_calls:
            return None
        letters = "".join(secrets.choice(_ID_LETTERS) for _ in range(self.id_length))
        call: Json = {
            "index": len(self._calls),
            "id": letters if self.id_length < _PREFIXED_FROM else f"call_{letters}",
            "type": "function",
            "function": {"name": event.name, "arguments": event.arguments},
        }
        self._calls.append(call)
        return {"tool_calls": [call]}

    def _chunk(self, delta: Json, finish_reason: str | None) -> Json:
        """A chunk's choice; the first after tokens came carries their log-probabilities."""
        logprobs = self._logprobs(self._pending) if self._pending else None
        self._written += self._pending
        self._pending = []
        return {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, entries: Sequence[Json]) -> Json | None:
        return {"content": list(entries), "refusal": None} if self._has_logprobs else None


_PREFIXED_FROM = 10
"""Mistral's templates take ids of nine letters and digits, and no others."""
