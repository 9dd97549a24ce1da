"""The bodies that clients get, whole and in chunks, as OpenAI's API defines them."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from qtool.runtime.request import FinishReason

Json = dict[str, object]

DONE = "data: [DONE]\n\n"


def event(body: Json) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


@dataclass
class Usage:
    """Tokens of a request so far, all its choices together."""

    prompt_tokens: int
    completion_tokens: int = 0

    def body(self) -> Json:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass
class Answer:
    """One choice, complete or so far."""

    text: str = ""
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Shape:
    """How one answer is written, in the dialect of its endpoint."""

    dialect: Literal["chat", "text"]
    model: str
    include_usage: bool = False
    """Whether chunks carry `usage`, null in all but the last."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, answers: Sequence[Answer], usage: Usage) -> Json:
        """The answer in one body."""
        choices = [self._choice(index, answer) for index, answer in enumerate(answers)]
        kind = "chat.completion" if self.dialect == "chat" else "text_completion"
        return {**self._envelope(kind, choices), "usage": usage.body()}

    def opening(self, index: int) -> Json | None:
        """The chunk that opens a choice before its first text, in chats."""
        if self.dialect == "text":
            return None
        return self._chunk([self._delta(index, {"role": "assistant", "content": "", "refusal": None}, None)])

    def pieces(self, index: int, text: str, finish_reason: FinishReason | None) -> list[Json]:
        """The chunks for a piece of text: none while it holds nothing."""
        if self.dialect == "text":
            if not text and finish_reason is None:
                return []
            choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
            return [self._chunk([choice])]
        chunks = []
        if text:
            chunks.append(self._chunk([self._delta(index, {"content": text}, None)]))
        if finish_reason is not None:
            chunks.append(self._chunk([self._delta(index, {}, finish_reason)]))
        return chunks

    def closing(self, usage: Usage) -> Json:
        """The last chunk, which has no choice but the usage."""
        return {**self._chunk([]), "usage": usage.body()}

    def _choice(self, index: int, answer: Answer) -> Json:
        content: Json = (
            {"message": {"role": "assistant", "content": answer.text, "refusal": None}}
            if self.dialect == "chat"
            else {"text": answer.text}
        )
        return {"index": index, **content, "logprobs": None, "finish_reason": answer.finish_reason}

    def _delta(self, index: int, delta: Json, finish_reason: FinishReason | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}

    def _chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self.dialect == "chat" else "text_completion"
        chunk = self._envelope(kind, choices)
        return {**chunk, "usage": None} if self.include_usage else chunk

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        prefix = "chatcmpl" if self.dialect == "chat" else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }
