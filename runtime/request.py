"""What a caller asks for, and the state of one sequence while it is served: plain data."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from qtool.errors import UsageError

FinishReason = Literal["stop", "length"]

_MAX_STOPS = 4
_MAX_CHOICES = 128
_SEED_BITS = 64


class ParameterError(UsageError):
    """A request's parameter has a value that can't be served; `param` is its name in the API."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.param = param


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Defaults are the OpenAI API's; a model's generation_config.json sets none.

    Raises ParameterError for a value out of range.
    """

    max_tokens: int = 16
    """Tokens to generate at most."""
    n: int = 1
    """Choices: answers to each prompt, which is computed once."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is all."""
    top_p: float = 1.0
    """Sample among the smallest set of likeliest tokens whose probabilities sum to top_p or more."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else is in the batch; None draws from the system."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; the answer holds what comes before the one that is complete first."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence: the model's end-of-sequence ids, unless the caller ignores them."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ParameterError("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if not 1 <= self.n <= _MAX_CHOICES:
            raise ParameterError("n", f"must be 1 to {_MAX_CHOICES}, got {self.n}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ParameterError("temperature", f"must be finite and at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise ParameterError("top_k", f"must be at least 1, or 0 for no limit, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ParameterError("top_p", f"must be above 0 and at most 1, got {self.top_p}")
        if self.seed is not None and not -(2 ** (_SEED_BITS - 1)) <= self.seed < 2**_SEED_BITS:
            raise ParameterError("seed", f"must fit in {_SEED_BITS} bits, got {self.seed}")
        if len(self.stop) > _MAX_STOPS:
            raise ParameterError("stop", f"takes at most {_MAX_STOPS} strings, got {len(self.stop)}")
        if "" in self.stop:
            raise ParameterError("stop", "holds an empty string, which would end every answer; remove it")

    def generator(self, choice: int = 0) -> np.random.Generator:
        """The generator that draws the tokens of this request's choice and no other's: seed + choice."""
        seed = None if self.seed is None else (self.seed + choice) % 2**_SEED_BITS
        return np.random.Generator(np.random.Philox(seed))


@dataclass(frozen=True)
class RequestOptions:
    """What a request asks of the server beside its tokens."""

    cache_salt: str = ""
    """Requests share computed prefixes only with those of the same salt."""
    priority: int = 0
    """Lower runs first, and gives up its place last; those of one priority go by arrival."""


@dataclass(eq=False)
class SequenceState:
    """One sequence: its tokens, how many of them the engine has computed, and where they lie in the pool."""

    id: int
    """Ascending in order of arrival."""
    tokens: list[int]
    """The prompt, then what was generated."""
    params: SamplingParams
    options: RequestOptions = RequestOptions()
    sibling: "SequenceState | None" = None
    """The first choice of the same prompt, whose computed prompt the other choices take over."""
    choice: int = 0
    num_prompt: int = field(init=False)
    num_computed: int = 0
    """Leading tokens whose keys and values are in the pool."""
    num_cached: int | None = None
    """Tokens of the prompt that the prefix cache held when the sequence was first admitted; None before."""
    num_published: int = 0
    """Leading blocks of the table that the prefix cache knows of."""
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    """Keys of the leading full blocks, as far as they were asked for."""
    generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        self.generator = self.params.generator(self.choice)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that wait to be computed: the rest of a prompt, or the one decoded last."""
        return len(self.tokens) - self.num_computed

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ends with its last token, or None while it goes on."""
        if self.tokens[-1] in self.params.stop_token_ids:
            return "stop"
        if len(self.tokens) - self.num_prompt >= self.params.max_tokens:
            return "length"
        return None
