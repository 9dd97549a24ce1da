"""The bodies that clients send, as OpenAI's API defines them. What is not supported is refused by name."""

import re
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from qtool.errors import nearest
from qtool.runtime.request import ParameterError, SamplingParams

Prompt = str | list[int]

_SURROGATE = re.compile("[\ud800-\udfff]")


class Body(BaseModel):
    """A request body. A null is an absent field; an unknown field, or one whose value asks for something
    that is not supported, raises ParameterError.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    no_effect: ClassVar[dict[str, tuple[object, ...]]] = {}
    """Known fields that are not supported, with the values by which a client asks for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if not _is_text(data):
            raise ParameterError("body", "holds half of a UTF-16 pair, which is no text; send valid Unicode")
        kept = {}
        for name, value in data.items():
            if value is None or value in cls.no_effect.get(name, ()):
                continue
            if name in cls.no_effect:
                raise ParameterError(
                    name, f"{value!r:.80} is not supported by this server; leave the field out"
                )
            if name not in cls.model_fields:
                known = [*cls.model_fields, *cls.no_effect]
                raise ParameterError(name, f"is no field of this request; {nearest(name, known)}")
            kept[name] = value
        return kept


class StreamOptions(Body):
    no_effect = {"include_obfuscation": (False,)}

    include_usage: bool = False


class GenerationBody(Body):
    """What completions and chat completions share."""

    model: str
    temperature: float = SamplingParams.temperature
    top_p: float = SamplingParams.top_p
    top_k: int = SamplingParams.top_k
    """Not in OpenAI's API; named as other servers name it."""
    seed: int | None = None
    stop: list[str] = []
    ignore_eos: bool = False
    """Not in OpenAI's API: go on to max_tokens, for load tests."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """A label for the provider; it changes nothing."""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options", "is only for a streamed answer; set stream to true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, max_tokens: int, eos_token_ids: frozenset[int]) -> SamplingParams:
        """The parameters to sample with; ParameterError for a value out of range."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=frozenset() if self.ignore_eos else eos_token_ids,
        )


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    no_effect = {
        "best_of": (1,),
        "echo": (False,),
        "frequency_penalty": (0,),
        "logit_bias": ({},),
        "logprobs": (),
        "n": (1,),
        "presence_penalty": (0,),
        "suffix": ("",),
    }

    prompt: list[Prompt]
    """One or several texts or lists of token ids."""
    max_tokens: int = SamplingParams.max_tokens

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_or_many_prompts(cls, value: Any) -> list[Prompt]:
        prompts = [value] if isinstance(value, str) or _is_token_ids(value) else value
        if isinstance(prompts, list) and prompts and all(isinstance(prompt, str) for prompt in prompts):
            return prompts
        if isinstance(prompts, list) and prompts and all(_is_token_ids(prompt) for prompt in prompts):
            return prompts
        raise ParameterError(
            "prompt", "must be a string, a list of strings, a list of token ids, or a list of such lists"
        )


class ChatMessage(Body):
    no_effect = {"tool_calls": ([],), "annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    """A list of text parts is joined by line breaks, since chat templates take one string."""
    name: str | None = None

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

    def for_template(self) -> dict[str, object]:
        """The message as templates know it: they have one role for instructions."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": self.content, "name": self.name}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    no_effect = {
        "audio": (),
        "frequency_penalty": (0,),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "logit_bias": ({},),
        "logprobs": (False,),
        "modalities": (["text"],),
        "n": (1,),
        "parallel_tool_calls": (True, False),
        "prediction": (),
        "presence_penalty": (0,),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: list[ChatMessage]
    max_tokens: int | None = None
    """Absent: as many as the context has room for."""
    max_completion_tokens: int | None = None
    """OpenAI's newer name for max_tokens."""
    metadata: dict[str, str] | None = None
    """Labels for the provider, like `user`, `safety_identifier` and `prompt_cache_key`."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "ChatBody":
        if not self.messages:
            raise ParameterError("messages", "is empty; send at least one message")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise ParameterError("max_tokens", "differs from max_completion_tokens; send one of them")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _is_text(value: object) -> bool:
    """Whether every string within is Unicode: JSON can escape half of a UTF-16 pair."""
    if isinstance(value, str):
        return _SURROGATE.search(value) is None
    if isinstance(value, dict):
        return all(_is_text(key) and _is_text(item) for key, item in value.items())
    return not isinstance(value, list) or all(_is_text(item) for item in value)


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(item) is int for item in value)


def _is_text_part(part: object) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )
