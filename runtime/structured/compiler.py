"""From a grammar to what restricts a sequence's tokens, through llguidance."""

import logging
import threading
from functools import lru_cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from qtool.runtime.constraint import Bitmask, ConstraintFactory, bitmask_width
from qtool.runtime.request import ParameterError
from qtool.runtime.structured.grammar import Grammar
from qtool.runtime.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_CACHED_GRAMMARS = 128
_MAX_MESSAGE = 300


class GrammarCompiler:
    """Compiles grammars for one tokenizer; any thread may call it. Grammars asked for before are kept."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` is the engine's, which may exceed the tokenizer's."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._trie: LLTokenizer | None = None
        self._compiled = lru_cache(_CACHED_GRAMMARS)(self._compile)

    def compile(self, grammar: Grammar) -> ConstraintFactory:
        """What makes a constraint for each sequence of a request. Takes milliseconds, the first one a second.

        Raises ParameterError, by the grammar's field, for one that is invalid or that can't be enforced.
        """
        matcher = self._compiled(grammar)
        return lambda: GrammarConstraint(matcher.deep_copy())

    def _compile(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary(), grammar.definition, log_level=0)
        if matcher.is_error():
            problem = " ".join(matcher.get_error().split())
            raise ParameterError(grammar.param, f"cannot be enforced: {problem:.{_MAX_MESSAGE}}")
        first = np.zeros(bitmask_width(self._vocab_size), np.int32)
        GrammarConstraint(matcher.deep_copy()).fill_mask(first)
        if not first.any():
            raise ParameterError(grammar.param, "no text meets it: there is no token to begin with")
        return matcher

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._trie is None:
                self._trie = LLTokenizer(
                    self._tokenizer.to_json(),
                    n_vocab=self._vocab_size,
                    eos_token=sorted(self._tokenizer.eos_token_ids) or None,
                )
            return self._trie


class GrammarConstraint:
    """One sequence's way through a grammar: a TokenConstraint.

    A grammar may turn out too complex to go on with. No token is allowed then, so that this request fails,
    and no other: the engine loop is everyone's.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing can follow it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def fill_mask(self, row: Bitmask) -> None:
        """Allow the tokens that the grammar can go on with."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            _log.warning("a grammar cannot be followed any further: %s", self._matcher.get_error())
            row[:] = 0

    def accept(self, token: int) -> None:
        """Move on by a token."""
        self._matcher.consume_token(token)

    def rollback(self, num_tokens: int) -> None:
        """Take back tokens."""
        self._matcher.rollback(num_tokens)
