"""What a caller asks for, and the state of one sequence while it is served: plain data."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from qtool.errors import UsageError
from qtool.runtime.constraint import ConstraintFactory, GuardedConstraint
from qtool.runtime.logprobs import TokenLogprobs

FinishReason = Literal["stop", "length"]
Pooling = Literal["mean", "last"]
"""How the hidden states of a prompt's tokens become one vector."""

_MAX_STOPS = 4
_MAX_CHOICES = 128
_MAX_LOGPROBS = 20
_MAX_PENALTY = 2
_MAX_BIAS = 100
_SEED_BITS = 64


class ParameterError(UsageError):
    """A request's parameter has a value that can't be served; `param` is its name in the API."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param}: {problem}")
        self.param = param


def refuse_ids_outside(param: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raise ParameterError for a token id that the model does not have: an engine would read past its
    embeddings.
    """
    outside = next((token for token in ids if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise ParameterError(param, f"token id {outside} is not in 0 … {vocab_size - 1}")


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
    min_p: float = 0.0
    """Sample among tokens of at least min_p times the likeliest one's probability."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer holds."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that the answer holds it."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and answer less likely, see `logits.penalize`."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    min_tokens: int = 0
    """Tokens to generate before a stop token or a stop string may end the answer."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that the answer may not hold."""
    allowed_token_ids: frozenset[int] | None = None
    """The only tokens to generate, where given; end-of-sequence tokens need to be among them."""
    logprobs: int | None = None
    """Report each token's log-probability, and those of so many likeliest tokens."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, given those before them; they are all computed, none is cached."""
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
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise ParameterError(
                "repetition_penalty", f"must be finite and above 0, got {self.repetition_penalty}"
            )
        self._check_range("min_p", 0, 1)
        self._check_range("presence_penalty", -_MAX_PENALTY, _MAX_PENALTY)
        self._check_range("frequency_penalty", -_MAX_PENALTY, _MAX_PENALTY)
        self._check_range("min_tokens", 0, self.max_tokens)
        self._check_range("logprobs", 0, _MAX_LOGPROBS)
        self._check_range("prompt_logprobs", 0, _MAX_LOGPROBS)
        if any(not -_MAX_BIAS <= bias <= _MAX_BIAS for bias in self.logit_bias.values()):
            raise ParameterError("logit_bias", f"must be {-_MAX_BIAS} to {_MAX_BIAS} for every token")
        if () in self.bad_words:
            raise ParameterError("bad_words", "holds an empty one, which no answer can avoid; remove it")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ParameterError("allowed_token_ids", "is empty, so that no token could be generated")
        if self.seed is not None and not -(2 ** (_SEED_BITS - 1)) <= self.seed < 2**_SEED_BITS:
            raise ParameterError("seed", f"must fit in {_SEED_BITS} bits, got {self.seed}")
        if len(self.stop) > _MAX_STOPS:
            raise ParameterError("stop", f"takes at most {_MAX_STOPS} strings, got {len(self.stop)}")
        if "" in self.stop:
            raise ParameterError("stop", "holds an empty string, which would end every answer; remove it")

    def _check_range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if value is not None and not low <= value <= high:
            raise ParameterError(name, f"must be {low} to {high}, got {value}")

    def refuse_tokens_outside(self, vocab_size: int) -> None:
        """Raise ParameterError for a token id that the model does not have."""
        given: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": (token for words in self.bad_words for token in words),
        }
        for name, tokens in given.items():
            refuse_ids_outside(name, tokens, vocab_size)

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything changes the model's logits before a token is chosen."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_tokens
            or self.bad_words
            or self.allowed_token_ids is not None
        )

    @property
    def forbids(self) -> list[str]:
        """Names of the parameters that keep tokens from coming next."""
        given = {
            "min_tokens": self.min_tokens,
            "bad_words": self.bad_words,
            "allowed_token_ids": self.allowed_token_ids,
        }
        return [name for name, value in given.items() if value]

    def generator(self, choice: int = 0) -> np.random.Generator:
        """The generator that draws the tokens of this request's choice and no other's: seed + choice."""
        seed = None if self.seed is None else (self.seed + choice) % 2**_SEED_BITS
        return np.random.Generator(np.random.Philox(seed))


@dataclass(frozen=True)
class RequestOptions:
    """What a request asks of the server beside its tokens."""

    constraint: ConstraintFactory | None = None
    """Restricts the tokens of each choice, as a grammar does."""
    keep_special_tokens: bool = False
    """Whether the text shows special tokens, by which some models mark tool calls."""
    cache_salt: str = ""
    """Requests share computed prefixes only with those of the same salt."""
    priority: int = 0
    """Lower runs first, and gives up its place last; those of one priority go by arrival."""
    pooling: Pooling | None = None
    """Asks for the prompt's embedding instead of tokens."""
    timeout_s: float | None = None
    """Seconds after which the request is given up if it is not complete."""

    def __post_init__(self) -> None:
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise ParameterError("timeout", f"must be finite and above 0 seconds, got {self.timeout_s}")


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
    arrived: float = 0.0
    """On the loop's clock, seconds, as the next two."""
    started: float | None = None
    """When it first ran; None before."""
    first_token: float | None = None
    """When its answer's first token was there; None before."""
    constraint: GuardedConstraint | None = field(init=False)
    num_prompt: int = field(init=False)
    num_computed: int = 0
    """Leading tokens whose keys and values are in the pool."""
    num_cached: int = 0
    """Tokens of the prompt that the prefix cache held when the sequence first ran."""
    num_published: int = 0
    """Leading blocks of the table that the prefix cache knows of."""
    num_accepted: int = 0
    """Tokens of the answer that were drafts."""
    num_rejected: int = 0
    """Drafts that were verified and are not in the answer."""
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    """As far as they are known and wanted; None for the first token."""
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    """Keys of the leading full blocks, as far as they were asked for."""
    generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.tokens)
        self.generator = self.params.generator(self.choice)
        factory = self.options.constraint
        self.constraint = None if factory is None else GuardedConstraint(factory())

    @property
    def deadline(self) -> float | None:
        """On the loop's clock; None without a limit."""
        timeout_s = self.options.timeout_s
        return None if timeout_s is None else self.arrived + timeout_s

    @property
    def was_admitted(self) -> bool:
        """Whether it has run, even if it waits again."""
        return self.started is not None

    @property
    def num_uncomputed(self) -> int:
        """Tokens that wait to be computed: the rest of a prompt, or the one decoded last."""
        return len(self.tokens) - self.num_computed

    @property
    def wants_prompt_logits(self) -> bool:
        """Whether log-probabilities of its prompt are still missing, so that none of it can be skipped."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    @property
    def num_generated(self) -> int:
        """Tokens of the answer so far."""
        return len(self.tokens) - self.num_prompt

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ends with its last token, or None while it goes on."""
        if self.tokens[-1] in self.params.stop_token_ids:
            return "stop"
        if self.constraint is not None and self.constraint.finished:
            return "stop"
        if self.num_generated >= self.params.max_tokens:
            return "length"
        return None
