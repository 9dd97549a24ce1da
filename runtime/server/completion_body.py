"""POST /v1/completions."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, field_validator

from qtool.runtime.request import ParameterError, SamplingParams
from qtool.runtime.server.generation_body import GenerationBody

Prompt = str | list[int]

_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
PROMPTS = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
_MAX_PROMPTS = 1024


class CompletionBody(GenerationBody):
    """A prompt, or several, to continue."""

    no_effect = {"best_of": (1,), "suffix": ("",)}

    prompt: Annotated[list[Prompt], WithJsonSchema(PROMPTS)]
    """One or several texts or lists of token ids."""
    max_tokens: Annotated[int, Field(ge=0)] = SamplingParams.max_tokens
    """0, with echo, asks for the prompt alone."""
    echo: bool = False
    """Begin the answer with the prompt."""
    logprobs: int | None = None
    """Log-probabilities of the answer's tokens (with echo, of the prompt's too), and of so many likeliest."""

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_or_many_prompts(cls, value: Any) -> list[Prompt]:
        return read_prompts("prompt", value)

    @property
    def only_prompt(self) -> bool:
        """Whether nothing is to be generated. Raises ParameterError unless the prompt is echoed."""
        if self.max_tokens == 0 and not self.echo:
            raise ParameterError("max_tokens", "must be at least 1, or 0 with echo, got 0")
        return self.max_tokens == 0


def read_prompts(param: str, value: object) -> list[Prompt]:
    """One or several texts or lists of token ids; ParameterError for `param` when it is none of these."""
    prompts = [value] if isinstance(value, str) or _is_token_ids(value) else value
    if isinstance(prompts, list) and len(prompts) > _MAX_PROMPTS:
        raise ParameterError(param, f"holds {len(prompts)} prompts; send at most {_MAX_PROMPTS}")
    if isinstance(prompts, list) and prompts and all(isinstance(prompt, str) for prompt in prompts):
        return prompts
    if isinstance(prompts, list) and prompts and all(_is_token_ids(prompt) for prompt in prompts):
        return prompts
    raise ParameterError(
        param, "must be a string, a list of strings, a list of token ids, or a list of such lists"
    )


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(type(item) is int for item in value)
