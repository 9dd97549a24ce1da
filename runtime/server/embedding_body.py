"""POST /v1/embeddings."""

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator

from qtool.runtime.request import ParameterError, Pooling, RequestOptions
from qtool.runtime.server.completion_body import PROMPTS, Prompt, read_prompts
from qtool.runtime.server.protocol import Body


class EmbeddingBody(Body):
    """One or several texts or lists of token ids."""

    no_effect = {"dimensions": ()}

    model: str
    input: Annotated[list[Prompt], WithJsonSchema(PROMPTS)]
    encoding_format: Literal["float", "base64"] = "float"
    user: str | None = None
    pooling: Pooling = "mean"
    """How the tokens' hidden states become one vector: their mean, or the last one alone."""
    cache_salt: str = RequestOptions.cache_salt
    priority: int = RequestOptions.priority
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> list[Prompt]:
        return read_prompts("input", value)

    @field_validator("input")
    @classmethod
    def _none_is_empty(cls, prompts: list[Prompt]) -> list[Prompt]:
        if not all(prompts):
            raise ParameterError("input", "holds an empty text, which has no embedding; leave it out")
        return prompts
