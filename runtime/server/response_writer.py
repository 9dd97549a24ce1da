"""Writes answers of /v1/responses."""

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from qtool.errors import QtoolError
from qtool.runtime.client import Piece
from qtool.runtime.server.response_body import ResponseBody
from qtool.runtime.server.responses import Json


@dataclass
class ResponseWriter:
    """A response with one message, of one text."""

    body: ResponseBody
    input_tokens: int
    _id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    _item_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    _created_at: int = field(default_factory=lambda: int(time.time()))
    _text: str = ""
    _status: str = "in_progress"
    _error: Json | None = None
    _output_tokens: int = 0
    _cached_tokens: int = 0
    _num_events: int = 0

    def opening(self) -> Sequence[str]:
        return [
            self._event("response.created", response=self._response([])),
            self._event("response.in_progress", response=self._response([])),
            self._event("response.output_item.added", output_index=0, item=self._item([])),
            self._part_event("response.content_part.added", part=self._part()),
        ]

    def push(self, piece: Piece) -> Sequence[str]:
        self._output_tokens += 1
        self._cached_tokens = piece.num_cached_tokens
        self._text += piece.text
        if piece.finish_reason is not None:
            self._status = "completed" if piece.finish_reason == "stop" else "incomplete"
        if not piece.text:
            return []
        return [self._part_event("response.output_text.delta", delta=piece.text, logprobs=[])]

    def closing(self) -> Sequence[str]:
        item = self._item([self._part()])
        return [
            self._part_event("response.output_text.done", text=self._text, logprobs=[]),
            self._part_event("response.content_part.done", part=self._part()),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{self._status}", response=self._response([item])),
        ]

    def failing(self, error: QtoolError) -> Sequence[str]:
        self._status, self._error = "failed", {"code": "server_error", "message": str(error)}
        return [self._event("response.failed", response=self._response([self._item([self._part()])]))]

    def whole(self) -> Json:
        return self._response([self._item([self._part()])])

    def _part(self) -> Json:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _item(self, content: Sequence[Json]) -> Json:
        status = "incomplete" if self._status == "failed" else self._status
        return {
            "type": "message",
            "id": self._item_id,
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _response(self, output: Sequence[Json]) -> Json:
        usage: Json = {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {"cached_tokens": self._cached_tokens},
            "output_tokens": self._output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.input_tokens + self._output_tokens,
        }
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": self.body.instructions,
            "max_output_tokens": self.body.max_output_tokens,
            "metadata": self.body.metadata or {},
            "model": self.body.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": self.body.temperature,
            "text": {"format": self.body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": "auto",
            "tools": [],
            "top_p": self.body.top_p,
            "truncation": "disabled",
            "usage": usage if self._status != "in_progress" else None,
            "user": self.body.user,
        }

    def _part_event(self, kind: str, **fields: object) -> str:
        return self._event(kind, item_id=self._item_id, output_index=0, content_index=0, **fields)

    def _event(self, kind: str, **fields: object) -> str:
        body = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"
