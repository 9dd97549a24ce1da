"""What a request's answers took, for metrics, logs and traces."""

import time
from collections.abc import Sequence

from qtool.runtime.client import Piece
from qtool.runtime.request import SamplingParams
from qtool.runtime.server.metrics import AnswerTimer, Metrics
from qtool.runtime.server.middleware import RequestRecord


class AnswersMeter:
    """Counts and times the answers to one request, and writes what is known of them into its record."""

    def __init__(
        self,
        metrics: Metrics,
        record: RequestRecord,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
    ) -> None:
        num_prompt_tokens = sum(map(len, prompts))
        metrics.prompt_tokens.inc(num_prompt_tokens)
        self._timers = [AnswerTimer(metrics, record.arrived) for _ in range(len(prompts) * params.n)]
        self._record = record
        self._num_choices = params.n
        self._begun: set[int] = set()
        self._reasons: dict[int, str] = {}
        self._num_tokens = self._num_cached = 0
        record.fields |= {
            "prompt_tokens": num_prompt_tokens,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
        }

    def take(self, piece: Piece) -> None:
        """One more token came."""
        fields = self._record.fields
        if not self._num_tokens:
            fields["ttft_seconds"] = round(time.perf_counter() - self._record.arrived, 6)
        self._num_tokens += 1
        if piece.index not in self._begun:
            self._begun.add(piece.index)
            # The other choices take over the first one's prompt: only that one was looked up in the cache.
            self._num_cached += piece.num_cached_tokens * (piece.index % self._num_choices == 0)
        fields["completion_tokens"], fields["cached_tokens"] = self._num_tokens, self._num_cached
        self._timers[piece.index].token()
        if piece.finish_reason is not None:
            self._timers[piece.index].finish()
            self._reasons[piece.index] = piece.finish_reason
            fields["finish_reasons"] = [self._reasons[index] for index in sorted(self._reasons)]

    def fail(self, error: Exception) -> None:
        """The answers end with an error."""
        self._record.fields["error"] = type(error).__name__
