"""POST /v1/chat/completions."""

import json
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from qtool.runtime.request import ParameterError
from qtool.runtime.server.generation_body import GenerationBody
from qtool.runtime.server.protocol import Body, JsonObject
from qtool.runtime.structured import grammar
from qtool.runtime.structured.grammar import Grammar
from qtool.runtime.tools.forcing import Tool

_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
Text = Annotated[str, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]})]
"""A list of text parts is joined by line breaks, since chat templates take one string."""


class CalledFunction(Body):
    """What an earlier answer called."""

    name: str
    arguments: str
    """A JSON object, as text."""


class MessageToolCall(Body):
    """A call in an earlier answer."""

    index: int | None = None
    """Its place, which chunks of a stream have; it changes nothing."""
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, object]:
        """The call as templates know it: its arguments are an object, not the text of one."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise ParameterError("messages", f"the arguments of call {self.id!r:.40} are not JSON") from error
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


class ChatMessage(Body):
    """One message of a chat."""

    no_effect = {"annotations": ([],), "refusal": ("",), "audio": (), "function_call": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] = []
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _join_parts(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if not all(_is_text_part(part) for part in value):
            raise ParameterError(
                "messages", 'content must be a string or parts {"type": "text", "text": ...}'
            )
        return "\n".join(part["text"] for part in value)

    @model_validator(mode="after")
    def _consistent(self) -> "ChatMessage":
        if self.content is None and not self.tool_calls:
            raise ParameterError("messages", f"a message of role {self.role} has no content")
        if self.tool_calls and self.role != "assistant":
            raise ParameterError("messages", f"a message of role {self.role} cannot have tool_calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ParameterError("messages", "tool_call_id belongs to messages of role tool, and to each")
        return self

    def for_template(self) -> dict[str, object]:
        """The message as templates know it: they have one role for instructions."""
        calls = [call.for_template() for call in self.tool_calls]
        return {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.content or "",
            "name": self.name,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
        }


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: JsonObject = {}
    strict: bool | None = None
    """Whether calls that the model makes of its own accord fit the schema; those that tool_choice forces do
    anyway."""


class ToolBody(Body):
    """A tool: a function."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, object]:
        """The tool as templates know it."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": function}


class FunctionName(Body):
    """Names a function."""

    name: str


class NamedTool(Body):
    """The one tool to call."""

    type: Literal["function"]
    function: FunctionName


class JsonSchemaFormat(Body):
    """A schema, and what the client calls it."""

    name: str | None = None
    description: str | None = None
    json_schema: Annotated[JsonObject, Field(alias="schema")] = {}
    strict: bool | None = None
    """The answer fits the schema whether this is set or not."""


class ResponseFormat(Body):
    """What the answer has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ResponseFormat":
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ParameterError(
                "response_format", "json_schema belongs to the type json_schema, and to each"
            )
        return self


class ChatBody(GenerationBody):
    """A chat whose next message is wanted."""

    no_effect = {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "modalities": (["text"],),
        "prediction": (),
        "reasoning_effort": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: Annotated[list[ChatMessage], Field(json_schema_extra={"minItems": 1})]
    max_tokens: int | None = None
    """Absent: as many as the context has room for."""
    max_completion_tokens: int | None = None
    """OpenAI's newer name for max_tokens."""
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    tools: list[ToolBody] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    """Whether the template opens a new answer."""
    continue_final_message: bool = False
    """Whether the answer goes on where the last message ends."""
    metadata: dict[str, str] | None = None
    """Labels for the provider, like `user`, `safety_identifier` and `prompt_cache_key`."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _chat_consistent(self) -> "ChatBody":
        if not self.messages:
            raise ParameterError("messages", "is empty; send at least one message")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise ParameterError("max_tokens", "differs from max_completion_tokens; send one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise ParameterError("top_logprobs", "is only for logprobs; set logprobs to true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ParameterError(
                "continue_final_message", "needs add_generation_prompt to be false: a turn is new or goes on"
            )
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ParameterError("tools", "has two functions of one name")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ParameterError("tool_choice", f"names {self.tool_choice.function.name!r:.80}, not in tools")
        if self.tool_choice == "required" and not names:
            raise ParameterError("tool_choice", "requires a call, but there are no tools")
        if self.may_call and self.grammar() is not None:
            raise ParameterError("tools", "and a format of the answer exclude each other; send one of them")

    @property
    def may_call(self) -> bool:
        """Whether the answer may call tools."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools of which one has to be called; empty when none has."""
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        if name is None and self.tool_choice != "required":
            return []
        functions = [tool.function for tool in self.tools if name in (None, tool.function.name)]
        return [Tool(function.name, function.parameters) for function in functions]

    @property
    def strict_tools(self) -> list[Tool]:
        """The tools of which each call has to fit, once the model begins one: empty when none is strict. The
        arguments of those that are not may be any object."""
        functions = [tool.function for tool in self.tools]
        if not any(function.strict for function in functions):
            return []
        return [Tool(function.name, function.parameters if function.strict else {}) for function in functions]

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def grammars(self) -> list[Grammar]:
        """What the answer has to look like, by each field that says so."""
        found = super().grammars()
        if self.response_format is not None and self.response_format.type == "json_object":
            found.append(grammar.json_object("response_format"))
        if self.response_format is not None and self.response_format.json_schema is not None:
            schema = self.response_format.json_schema.json_schema
            found.append(grammar.json_schema("response_format", schema))
        return found


def _is_text_part(part: object) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )
