"""From a draft head's logits, over its own tokens, to tokens of the target."""

import numpy as np

from qtool.runtime.engines.contract import Floats, Ints
from qtool.runtime.logits import adjusted
from qtool.runtime.sampling import distribution
from qtool.runtime.speculation.contract import DraftRequest


class Chooser:
    """Chooses drafts as the request's rules say: penalties, masks and grammar change a head's logits as they
    do the target's."""

    def __init__(self, tokens: Ints, vocab_size: int) -> None:
        """`tokens` [draft vocabulary] says which of the target's each of the head's is."""
        self._tokens, self._vocab_size = tokens, vocab_size
        self._generator = np.random.default_rng()

    def likeliest(
        self, logits: Floats, request: DraftRequest, drafted: list[int], count: int
    ) -> list[tuple[int, float]]:
        """The `count` likeliest tokens after `drafted`, with the logarithms of their probabilities; fewer
        where the rules allow fewer."""
        params, sequence = request.sequence.params, request.sequence
        if params.adjusts_logits or sequence.constraint is not None:
            row, tokens = adjusted(self._spread(logits), sequence, drafted), None
        else:
            row, tokens = logits, self._tokens
        count = min(count, len(row))
        best = np.argpartition(row, -count)[-count:] if count > 1 else np.array([row.argmax()])
        best = best[np.argsort(-row[best], kind="stable")]
        highest = row[best[0]]
        if not np.isfinite(highest):
            return []
        total = highest + np.log(np.exp(row - highest).sum())
        return [
            (int(place if tokens is None else tokens[place]), float(row[place] - total))
            for place in best
            if np.isfinite(row[place])
        ]

    def draw(self, logits: Floats, request: DraftRequest, drafted: list[int]) -> tuple[int, Floats] | None:
        """A token drawn as the request draws its own, and the distribution [V] that it was drawn from; None
        where the rules allow none."""
        row = adjusted(self._spread(logits), request.sequence, drafted)
        if not np.isfinite(row.max()):
            return None
        drawn = distribution(row, request.sequence.params)
        return drawn.draw(self._generator), drawn.probs()

    def _spread(self, logits: Floats) -> Floats:
        """Logits [V] of the target's tokens: those that the head does not know never come."""
        row = np.full(self._vocab_size, -np.inf, np.float32)
        row[self._tokens] = logits
        return row
