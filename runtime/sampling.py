"""From logits to tokens. Pure numpy; a row's token depends on that row, its parameters and its generator."""

from dataclasses import dataclass

import numpy as np

from qtool.runtime.engines.contract import Floats
from qtool.runtime.request import SamplingParams

NO_TOKEN = -1
"""Stands for the token of a row whose logits have no finite maximum."""

_COLDEST = float(np.finfo(np.float32).tiny)
"""A temperature below is this one, which leaves only the likeliest tokens: it would be 0 in float32."""

_CHUNK = 256
_FEW = 4096
_SAMPLE = 2048
_MARGIN = 128
"""In places of the sample: over five standard deviations of where a quantile lies in it."""


@dataclass(frozen=True)
class Distribution:
    """What one token is drawn from: token t has probability weights[t] / total."""

    weights: Floats
    """[V], 0 for tokens that are never drawn."""
    total: float

    def probs(self) -> Floats:
        """[V], summing to 1."""
        return self.weights / np.float32(self.total)

    def draw(self, generator: np.random.Generator) -> int:
        """A token; never one of probability 0.

        Tokens race: each arrives at a time drawn from the exponential distribution, over its weight, and the
        first is the token (the Gumbel-max trick, Maddison et al. 2014, in logarithms). First chunks of them
        do, by the sums of their weights. So a generator in the same state gives the same token, unless two
        come at the same time but for what kernels round, which is rare. In a cumulative distribution every
        border moves by that, and at a temperature of 1 many tokens are narrower.
        """
        start = _CHUNK * _first(_chunk_sums(self.weights), generator)
        return start + _first(self.weights[start : start + _CHUNK], generator)


def _first(weights: Floats, generator: np.random.Generator) -> int:
    """Which of the weights wins a race."""
    arrivals = np.full(len(weights), np.inf)
    np.divide(generator.standard_exponential(len(weights)), weights, out=arrivals, where=weights > 0)
    return int(arrivals.argmin())


def _chunk_sums(weights: Floats) -> Floats:
    sums: Floats = np.add.reduceat(weights, np.arange(0, len(weights), _CHUNK))
    return sums


def _reaching(weights: Floats, mass: float) -> int:
    """How many of the weights come before the one with which they reach a mass together."""
    # First the chunk, then the place in it: summing in order is slow, and most of it is not needed.
    chunk, rest = _locate(_chunk_sums(weights), mass)
    start = chunk * _CHUNK
    place, _ = _locate(weights[start : start + _CHUNK], rest)
    return start + place


def _locate(weights: Floats, mass: float) -> tuple[int, float]:
    """As `_reaching`, and how much of the mass is left for that one."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    # Sums round: a mass beyond all is reached with the last weight that is not 0.
    mass = min(mass, float(np.nextafter(cumulative[-1], 0)))
    index = int(np.searchsorted(cumulative, mass))
    return index, mass - float(cumulative[index - 1]) if index else mass


def sample(logits: Floats, params: SamplingParams, generator: np.random.Generator) -> int:
    """A token by its logits [V]; NO_TOKEN where they are not finite.

    Greedy takes nothing from the generator. A batch is a loop over its rows: a row's arithmetic is vectorised
    and stays in the cache, and the call costs some microseconds.
    """
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        return NO_TOKEN
    if params.temperature == 0:
        return best
    return distribution(logits, params).draw(generator)


def distribution(logits: Floats, params: SamplingParams) -> Distribution:
    """The distribution that logits [V] give at a temperature above 0, narrowed to the likeliest tokens.

    Kept is what top-k, top-p and min-p all keep. Top-p is the nucleus of Holtzman et al. (2020, section 3.1),
    the smallest set of likeliest tokens whose probabilities, renormalised after top-k, sum to top_p or more.
    Min-p keeps tokens of at least min_p times the likeliest one's probability (Nguyen et al. 2024, section
    3). Equal logits rank by token id, lowest first, so that top-k keeps exactly k and top-k of 1 is greedy.
    """
    with np.errstate(over="ignore", under="ignore"):  # a tiny temperature sends all but the best to exp(-inf)
        weights = logits - logits.max()
        weights /= np.float32(max(params.temperature, _COLDEST))
    np.exp(weights, out=weights)
    top_k = min(params.top_k or len(weights), len(weights))
    if top_k < len(weights) or params.top_p < 1 or params.min_p > 0:
        _keep(weights, *_cut(weights, top_k, params))
    return Distribution(weights, float(weights.sum()))


def _cut(weights: Floats, top_k: int, params: SamplingParams) -> tuple[int, float]:
    """How many of the largest weights are kept, and the least of them; the largest weight is 1."""
    ranked = weights
    if top_k < len(weights):
        ranked = np.partition(weights, len(weights) - top_k)[-top_k:]
    size, least = len(ranked), float(ranked.min())
    if params.top_p < 1:
        size, least = _nucleus(ranked, params.top_p)
    if least < params.min_p:
        size, least = int(np.count_nonzero(ranked >= np.float32(params.min_p))), params.min_p
    return size, least


def _nucleus(weights: Floats, share: float) -> tuple[int, float]:
    """How many of the largest weights make up a share of their sum, and the least of them."""
    total = float(weights.sum())
    # Weights below this make up less than 1 - share together, so the nucleus lies above.
    above = weights >= np.float32((1 - share) * total / len(weights))
    if np.count_nonzero(above) <= _FEW:
        # (indexing by truth values is five times slower than compress where they alternate)
        return _nucleus_sorted(np.compress(above, weights), share * total, 0)
    # Many like weights: sort only those around the place where a sample of them has its end.
    sample = np.sort(weights[:: len(weights) // _SAMPLE])[::-1]
    end = _reaching(sample, share * float(sample.sum()))
    high = sample[end - _MARGIN] if end >= _MARGIN else np.inf
    low = sample[min(end + _MARGIN, len(sample) - 1)]
    above = weights > high
    mass = float(np.multiply(weights, above).sum())
    middle = np.compress((weights >= low) & ~above, weights)
    if mass < share * total <= mass + float(middle.sum()):
        return _nucleus_sorted(middle, share * total - mass, int(np.count_nonzero(above)))
    return _nucleus_sorted(weights, share * total, 0)


def _nucleus_sorted(weights: Floats, mass: float, num_above: int) -> tuple[int, float]:
    """As `_nucleus`, of weights that follow `num_above` larger ones and reach a mass."""
    ranked = np.sort(weights)[::-1]
    last = min(_reaching(ranked, mass), len(ranked) - 1)
    return num_above + last + 1, float(ranked[last])


def _keep(weights: Floats, size: int, least: float) -> None:
    """Set to 0, in place, all but the `size` largest weights, of which `least` is the smallest."""
    kept = weights >= least
    excess = int(np.count_nonzero(kept)) - size
    if excess > 0:
        kept[np.flatnonzero(weights == least)[-excess:]] = False
    np.multiply(weights, kept, out=weights)
