"""How long a step takes: a linear model, fitted to a sweep at the start and kept current."""

from collections.abc import Sequence
from dataclasses import dataclass

_FORGETTING = 0.98
"""Weight of a step relative to the one after it: the last 50 or so count."""
_SWEEP_WEIGHT = 5.0
"""Weight of the whole sweep in steps: what load never shows stays known, what it shows soon prevails."""
_RIDGE = 1e-9

Vector = list[float]
Matrix = list[Vector]


@dataclass(frozen=True)
class StepLoad:
    """What a step computes."""

    tokens: int = 0
    context: int = 0
    """Pairs of a new token and a token that it attends to."""
    sequences: int = 0

    def plus(self, past: int, new: int) -> "StepLoad":
        """With `new` tokens more, of a sequence that has `past` computed ones."""
        pairs = new * past + new * (new + 1) // 2
        return StepLoad(self.tokens + new, self.context + pairs, self.sequences + 1)


class StepTimeModel:
    """Milliseconds of a step = fixed + a · tokens + b · context + c · sequences, none of them negative.

    Weighted least squares over the normal equations: each step counts by the inverse square of its expected
    time, so that errors are relative, and less with every step after it (Haykin, Adaptive Filter Theory,
    chapter on recursive least squares). By the time that it took, a step that was held up would hardly count,
    and what is foretold would be below the mean. The sweep's equations do not fade, so that directions in
    which load does not move (all steps decode, say) stay determined; they follow a machine that gets slower
    or faster as a whole.
    """

    def __init__(self, sweep: Sequence[tuple[StepLoad, float]]) -> None:
        """`sweep` holds loads and the milliseconds that they took."""
        self._sweep = _Equations()
        for load, ms in sweep:
            self._sweep.add(load, ms, ms)
        self._sweep.scale(_SWEEP_WEIGHT / len(sweep))
        self._recent = _Equations()
        self._at_start = self._coefficients = self._fit(1.0)
        self._pace = 1.0
        """Time that steps take now over what the sweep foretold."""

    def predict_ms(self, load: StepLoad) -> float:
        """Expected milliseconds of a step."""
        return _dot(self._coefficients, _features(load))

    def update(self, load: StepLoad, ms: float) -> None:
        """Take in what a step took."""
        foretold = max(_dot(self._at_start, _features(load)), 1e-6)
        self._pace += (1 - _FORGETTING) * (ms / foretold - self._pace)
        self._recent.scale(_FORGETTING)
        self._recent.add(load, ms, self.predict_ms(load))
        self._coefficients = self._fit(self._pace)

    def _fit(self, pace: float) -> Vector:
        normal = [
            [a + b for a, b in zip(*rows, strict=True)]
            for rows in zip(self._sweep.normal, self._recent.normal, strict=True)
        ]
        moment = [pace * a + b for a, b in zip(self._sweep.moment, self._recent.moment, strict=True)]
        return _solve_nonnegative(normal, moment)


def _dot(left: Vector, right: Vector) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _features(load: StepLoad) -> Vector:
    return [1.0, float(load.tokens), load.context / 1000, float(load.sequences)]


class _Equations:
    """The normal equations of weighted least squares, summed up."""

    def __init__(self) -> None:
        size = len(_features(StepLoad()))
        self.normal: Matrix = [[0.0] * size for _ in range(size)]
        self.moment: Vector = [0.0] * size

    def add(self, load: StepLoad, ms: float, expected_ms: float) -> None:
        features = _features(load)
        weight = 1 / max(expected_ms, 1e-3) ** 2
        for i, x in enumerate(features):
            self.moment[i] += weight * x * ms
            for j, y in enumerate(features):
                self.normal[i][j] += weight * x * y

    def scale(self, factor: float) -> None:
        self.normal = [[factor * value for value in row] for row in self.normal]
        self.moment = [factor * value for value in self.moment]


def _solve_nonnegative(normal: Matrix, moment: Vector) -> Vector:
    """Least squares with coefficients of 0 or more: the most negative one is dropped until none is left."""
    kept = list(range(len(moment)))
    while kept:
        solution = _solve([[normal[i][j] for j in kept] for i in kept], [moment[i] for i in kept])
        worst = min(range(len(kept)), key=solution.__getitem__)
        if solution[worst] >= 0:
            found = dict(zip(kept, solution, strict=True))
            return [found.get(i, 0.0) for i in range(len(moment))]
        del kept[worst]
    return [0.0] * len(moment)


def _solve(matrix: Matrix, right: Vector) -> Vector:
    """Gaussian elimination for a positive semidefinite matrix; a ridge settles what is undetermined."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        rows[i][i] += _RIDGE * (matrix[i][i] + 1)
    for i in range(size):
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            rows[j] = [b - factor * a for a, b in zip(rows[i], rows[j], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - known) / rows[i][i]
    return solution
