"""POST /v1/responses: the part of it that asks for one text."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from qtool.runtime.request import ParameterError
from qtool.runtime.server.chat_body import ChatBody
from qtool.runtime.server.protocol import Body, JsonObject

_PART_TYPES = ("input_text", "output_text")
_PART = {
    "type": "object",
    "properties": {"type": {"enum": list(_PART_TYPES)}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT = WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]})


class InputMessage(Body):
    """One message of the input; an earlier answer's message is taken as it was given."""

    no_effect = {"status": ("completed",), "phase": ()}

    type: Literal["message"] = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, _CONTENT]

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if not all(_is_text_part(part) for part in value):
            raise ParameterError(
                "input", 'content must be a string or parts {"type": "input_text", "text": ...}'
            )
        return "\n".join(part["text"] for part in value)


class TextFormat(Body):
    """What the answer has to look like."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[JsonObject | None, Field(alias="schema")] = None
    strict: bool | None = None

    def for_chat(self) -> JsonObject:
        """The same as a chat's `response_format`."""
        if self.json_schema is None:
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"schema": self.json_schema}}


class TextOptions(Body):
    """How the text is written."""

    no_effect = {"verbosity": ("medium",)}

    format: TextFormat = TextFormat()


class ResponseBody(Body):
    """Asks for one text. Nothing is stored, so that no later request can refer to it."""

    no_effect = {
        "background": (False,),
        "conversation": (),
        "include": ([],),
        "max_tool_calls": (),
        "parallel_tool_calls": (True, False),
        "previous_response_id": (),
        "prompt": (),
        "reasoning": (),
        "service_tier": ("auto", "default"),
        "tool_choice": ("auto", "none"),
        "tools": ([],),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    model: str
    input: Annotated[
        list[InputMessage],
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"$ref": "#/components/schemas/InputMessage"}, "minItems": 1},
                ]
            }
        ),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    text: TextOptions = TextOptions()
    stream: bool = False
    store: bool = False
    """Taken, for it is OpenAI's default, but nothing is stored."""
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _text_is_a_message(cls, value: Any) -> Any:
        return [{"role": "user", "content": value}] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _not_empty(self) -> "ResponseBody":
        if not self.input:
            raise ParameterError("input", "is empty; send a text or at least one message")
        return self

    def for_chat(self) -> ChatBody:
        """The chat that asks for the same text."""
        messages = [{"role": message.role, "content": message.content} for message in self.input]
        if self.instructions is not None:
            messages.insert(0, {"role": "system", "content": self.instructions})
        return ChatBody.model_validate(
            {
                "model": self.model,
                "messages": messages,
                "max_tokens": self.max_output_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "response_format": self.text.format.for_chat(),
            }
        )


def _is_text_part(part: object) -> bool:
    """Parts of earlier answers come with annotations and log-probabilities, which are no text."""
    return isinstance(part, dict) and part.get("type") in _PART_TYPES and isinstance(part.get("text"), str)
