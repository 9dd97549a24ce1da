"""The bodies around the choices of an answer, whole and in chunks, as OpenAI's API defines them."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

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
    cached_tokens: int = 0
    """Tokens of the prompts that the prefix cache held."""
    drafts: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By answer, how many drafts were accepted and how many rejected; none where none were made."""
    speculates: bool = False
    """Whether drafts are made at all, so that their counts are told, be they 0."""

    def body(self) -> Json:
        body: Json = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.speculates:
            body["completion_tokens_details"] = {
                "accepted_prediction_tokens": sum(accepted for accepted, _ in self.drafts.values()),
                "rejected_prediction_tokens": sum(rejected for _, rejected in self.drafts.values()),
            }
        return body


@dataclass(frozen=True)
class Envelope:
    """What all bodies of one answer have in common, in the dialect of its endpoint."""

    dialect: Literal["chat", "text"]
    model: str
    include_usage: bool = False
    """Whether chunks carry `usage`, null in all but the last."""
    continuous_usage: bool = False
    """Whether every chunk carries the usage so far."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Json], usage: Usage) -> Json:
        """The answer in one body."""
        kind = "chat.completion" if self.dialect == "chat" else "text_completion"
        return {**self._body(kind, choices), "usage": usage.body()}

    def chunk(self, choice: Json, usage: Usage) -> Json:
        """A chunk of a stream."""
        body = self._body(self._chunk_kind, [choice])
        if self.continuous_usage:
            return {**body, "usage": usage.body()}
        return {**body, "usage": None} if self.include_usage else body

    def closing(self, usage: Usage) -> Json:
        """The last chunk, which has no choice but the usage."""
        return {**self._body(self._chunk_kind, []), "usage": usage.body()}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.dialect == "chat" else "text_completion"

    def _body(self, kind: str, choices: Sequence[Json]) -> Json:
        prefix = "chatcmpl" if self.dialect == "chat" else "cmpl"
        return {
            "id": f"{prefix}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }
