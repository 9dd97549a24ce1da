"""Which drafts the target accepts, so that what comes out is distributed as if there were none. Pure numpy.

Everything broadcasts over leading dimensions: the tests draw millions at once from what serving calls.
"""

import numpy as np
from numpy.typing import NDArray

Probs = NDArray[np.floating]
Integers = NDArray[np.integer]

UNDECIDED = -1


def draw(p: Probs, candidates: Integers, q: Probs, uniforms: Probs) -> Integers:
    """A token distributed as p that is one of the candidates as often as can be.

    The C `candidates` [..., C] were drawn from q [..., V] one after the other, without replacement. Each in
    turn is accepted with probability min(1, p/q); what was rejected leaves the residual max(0, p - q) to be
    p, and the next was drawn from a q without the one before it (speculative sampling: Leviathan et al.
    2023, theorem 1, and Chen et al. 2023, theorem 1; several candidates: SpecInfer, Miao et al. 2024, section
    4.3, and EAGLE, Li et al. 2024, appendix). When none is accepted, the token is drawn from the residual,
    which is 0 at all of them: the token is a candidate exactly if that was accepted.

    p [..., V] and q sum to 1; `uniforms` [..., C + 1] in [0, 1) decide. Returns tokens [...].
    """
    p, q = p.astype(np.float64), q.astype(np.float64)
    token = np.full(p.shape[:-1], UNDECIDED, np.int64)
    for place in range(candidates.shape[-1]):
        candidate = candidates[..., place, None]
        p_of, q_of = _at(p, candidate), _at(q, candidate)
        accepted = (token == UNDECIDED) & (uniforms[..., place] * q_of < p_of)
        token = np.where(accepted, candidate[..., 0], token)
        if (token != UNDECIDED).all():
            return token
        p = residual(p, q)
        np.put_along_axis(q, candidate, 0.0, axis=-1)
        q /= np.maximum(q.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    return np.where(token == UNDECIDED, draw_from(p, uniforms[..., -1]), token)


def draw_block(p: Probs, candidates: Integers, q: Probs, uniforms: Probs) -> tuple[Integers, Integers]:
    """How many tokens of a chain are accepted, and the token that follows them.

    The tokens are decided on together, which accepts more than one by one and never fewer (block
    verification, Sun et al. 2024, algorithm 2). p [..., K + 1, V] are the target's distributions after 0 … K
    tokens of the chain `candidates` [..., K]; q [..., K, V] is what they were drawn from; `uniforms`
    [..., K + 1]. Returns counts [...] and tokens [...].
    """
    p, q = p.astype(np.float64), q.astype(np.float64)
    num_candidates = candidates.shape[-1]
    share = np.ones(p.shape[:-2])
    """Probability that the tokens so far are kept, as far as they themselves decide it."""
    count = np.zeros(p.shape[:-2], np.int64)
    rest = residual(p[..., 0, :], q[..., 0, :])
    for place in range(num_candidates):
        candidate = candidates[..., place, None]
        p_of, q_of = _at(p[..., place, :], candidate), _at(q[..., place, :], candidate)
        share = np.minimum(share * p_of / np.maximum(q_of, np.finfo(np.float64).tiny), 1.0)
        after = p[..., place + 1, :]
        if place + 1 == num_candidates:
            accept, beyond = share, after
        else:
            beyond = np.maximum(share[..., None] * after - q[..., place + 1, :], 0.0)
            mass = beyond.sum(axis=-1)
            whole = mass + 1 - share
            accept = np.where(whole > 0, mass / np.where(whole > 0, whole, 1.0), 1.0)
        accepted = uniforms[..., place] < accept
        count = np.where(accepted, place + 1, count)
        rest = np.where(accepted[..., None], beyond, rest)
    return count, draw_from(rest, uniforms[..., -1])


def residual(p: Probs, q: Probs) -> Probs:
    """What is left of p [..., V] when a token drawn from q was rejected: max(0, p - q), summing to 1."""
    left = np.maximum(p - q, 0.0)
    total = left.sum(axis=-1, keepdims=True)
    # p == q rejects nothing but by rounding; any answer of p's is right then.
    return np.where(total > 0, left / np.where(total > 0, total, 1.0), p)


def draw_from(weights: Probs, uniform: Probs) -> Integers:
    """Tokens [...] at points [...] of [0, 1) of the cumulative weights [..., V]; never one of weight 0."""
    cumulative = np.cumsum(weights, axis=-1, dtype=np.float64)
    last = cumulative[..., -1:]
    point = np.minimum(np.asarray(uniform)[..., None] * last, np.nextafter(last, 0))
    return np.asarray((cumulative <= point).sum(axis=-1))


def _at(values: Probs, places: Integers) -> Probs:
    """Values [..., V] at places [..., 1], [...]."""
    return np.take_along_axis(values, places, axis=-1)[..., 0]
