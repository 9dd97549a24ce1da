"""What the bodies of completions and of chats share: how to sample, how to answer."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from qtool.runtime.request import ParameterError, RequestOptions, SamplingParams
from qtool.runtime.server.protocol import Body, JsonObject
from qtool.runtime.structured import grammar
from qtool.runtime.structured.grammar import Grammar
from qtool.runtime.tokenizer import Tokenizer

OneOrMany = Annotated[
    list[str], WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})
]

_MAX_BAD_WORDS = 256


class StreamOptions(Body):
    """What a stream holds beside the answer."""

    no_effect = {"include_obfuscation": (False,)}

    include_usage: bool = False
    """A last chunk with the usage."""
    continuous_usage_stats: bool = False
    """The usage so far in every chunk."""


class GenerationBody(Body):
    """Fields of completions and chats alike; those that OpenAI's API lacks are named as other servers do."""

    model: str
    temperature: float = SamplingParams.temperature
    top_p: float = SamplingParams.top_p
    top_k: int = SamplingParams.top_k
    min_p: float = SamplingParams.min_p
    presence_penalty: float = SamplingParams.presence_penalty
    frequency_penalty: float = SamplingParams.frequency_penalty
    repetition_penalty: float = SamplingParams.repetition_penalty
    logit_bias: dict[str, float] = {}
    """By token id, which JSON writes as a string."""
    min_tokens: int = SamplingParams.min_tokens
    bad_words: list[str] = []
    allowed_token_ids: list[int] | None = None
    n: int = SamplingParams.n
    seed: int | None = None
    stop: OneOrMany = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    """Go on to max_tokens, for load tests."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    """A label for the provider; it changes nothing."""
    cache_salt: str = RequestOptions.cache_salt
    priority: int = RequestOptions.priority
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds until the request is given up; the header X-Request-Timeout says the same."""
    guided_json: JsonObject | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options", "is only for a streamed answer; set stream to true")
        if len(self.bad_words) > _MAX_BAD_WORDS:
            raise ParameterError("bad_words", f"takes at most {_MAX_BAD_WORDS}, got {len(self.bad_words)}")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def grammars(self) -> list[Grammar]:
        """What the answer has to look like, by each field that says so."""
        found = []
        if self.guided_json is not None:
            found.append(grammar.json_schema("guided_json", self.guided_json))
        if self.guided_regex is not None:
            found.append(grammar.regex("guided_regex", self.guided_regex))
        if self.guided_choice is not None:
            found.append(grammar.choice("guided_choice", self.guided_choice))
        if self.guided_grammar is not None:
            found.append(grammar.lark_or_gbnf("guided_grammar", self.guided_grammar))
        return found

    def grammar(self) -> Grammar | None:
        """The one grammar of the answer. Raises ParameterError for two."""
        found = self.grammars()
        if len(found) > 1:
            raise ParameterError(
                found[1].param, f"and {found[0].param} both say what the answer looks like; send one of them"
            )
        return found[0] if found else None

    def sampling_params(
        self,
        tokenizer: Tokenizer,
        max_tokens: int,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> SamplingParams:
        """The parameters to sample with; ParameterError for a value out of range."""
        ends = frozenset() if self.ignore_eos else tokenizer.eos_token_ids
        return SamplingParams(
            max_tokens=max_tokens,
            n=self.n,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias={_token_id(key): bias for key, bias in self.logit_bias.items()},
            min_tokens=self.min_tokens,
            bad_words=_spellings(tokenizer, self.bad_words),
            allowed_token_ids=None if self.allowed_token_ids is None else frozenset(self.allowed_token_ids),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            seed=self.seed,
            stop=tuple(self.stop),
            stop_token_ids=ends | frozenset(self.stop_token_ids),
        )


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal()):
        raise ParameterError("logit_bias", f"has the key {key!r:.40}, which is no token id")
    return int(key)


def _spellings(tokenizer: Tokenizer, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """Tokens of each word, at a text's beginning and after a space."""
    texts = [text for word in words for text in (word, f" {word}")]
    spelled = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts)
    return tuple(dict.fromkeys(spelled))
