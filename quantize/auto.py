"""Share out bits among linears: to each the number format with which all together lose least."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from qtool.calibrate.layers import LayerRunner
from qtool.calibrate.skeleton import HEAD
from qtool.core.checkpoint import Checkpoint
from qtool.core.formats import compressed_tensors
from qtool.core.manifest import Allocation, Point
from qtool.core.recipe import Auto, Budget, Quantization, Recipe
from qtool.core.schemes import WeightScheme
from qtool.errors import UsageError
from qtool.quantize.allocation import Frontier, Option, frontier
from qtool.quantize.changes import WeightPart
from qtool.quantize.fisher import hidden_states
from qtool.quantize.fused import of_one_format
from qtool.quantize.methods.rtn import rtn
from qtool.quantize.plan import Assignment, Plan, candidates
from qtool.quantize.progress import Report
from qtool.quantize.sensitivity import estimate
from qtool.quantize.work import ALLOCATION, WorkFolder

_Candidates = Mapping[str, tuple[WeightScheme, ...]]
_SHOWN = 17
"""Points of the frontier that are kept for people to see."""


def in_features(runner: LayerRunner) -> dict[str, int]:
    """K of every linear, by full name."""
    return {name: linear.in_features for name, linear in runner.linears().items()}


def kept_allocation(
    source: Checkpoint, windows: Tensor, recipe: Recipe, work: WorkFolder, progress: Report
) -> Allocation:
    """What ``auto`` comes to on the first of the calibration windows, found once: `work` keeps it."""
    auto = recipe.quantization.auto
    assert auto is not None
    runner = LayerRunner(source)  # one of its own: it remembers what layers are called with, at one length

    def found() -> str:
        choices = candidates(recipe.quantization, in_features(runner))
        seed = recipe.calibration.seed
        allocation = allocate(
            runner, windows, auto, choices, seed, lambda done, total: progress(done, total, None)
        )
        return allocation.model_dump_json(indent=2)

    return Allocation.model_validate_json(work.once(ALLOCATION, found))


def shared_out(
    plan: Plan, quantization: Quantization, allocation: Allocation, linears: Mapping[str, int]
) -> Plan:
    """The plan with the linears of ``auto`` too; `linears` gives in_features, in the model's order."""
    assert quantization.auto is not None
    method, schemes = quantization.auto.method, candidates(quantization, linears)
    chosen = {
        module: Assignment(method, schemes[module][place]) for module, place in allocation.candidates.items()
    }
    assigned = plan.assigned | chosen
    return replace(plan, assigned={module: assigned[module] for module in linears if module in assigned})


def allocate(
    runner: LayerRunner,
    windows: Tensor,
    auto: Auto,
    choices: _Candidates,
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Allocation:
    """The format of each linear, by the KL that rounding it alone to each of its candidates would cost.

    Linears that engines fuse get the same, and so do all the experts of a layer. KLs of several are taken to
    add up. The budget has passed `check_budget`; raises UsageError for one of KL that no choice keeps.
    """
    groups = _groups(choices)
    sizes, count = _sizes(runner, groups, choices), _num_weights(runner, choices)
    windows = windows[: auto.num_samples, : auto.seq_len]
    parts = [WeightPart(module, scheme) for module, schemes in choices.items() for scheme in schemes]
    lost = estimate(runner, windows, hidden_states(runner, windows), parts, seed, progress)
    curve = frontier(
        [
            [
                Option(size, sum(lost[WeightPart(one, choices[one][place])] for one in group))
                for place, size in enumerate(of_group)
            ]
            for group, of_group in zip(groups, sizes, strict=True)
        ]
    )
    point = _choose(curve, auto.budget, count)
    chosen = zip(groups, curve.options(point), strict=True)
    places = {module: place for group, place in chosen for module in group}
    return Allocation(
        candidates={module: places[module] for module in choices},
        chosen=_point(curve, point, count),
        frontier=tuple(_point(curve, one, count) for one in _shown(curve)),
    )


def check_budget(runner: LayerRunner, budget: Budget, choices: _Candidates) -> None:
    """Raise UsageError for a budget of bytes or bits that the smallest candidates exceed."""
    least = sum(map(min, _sizes(runner, _groups(choices), choices)))
    _check_size(budget, least, _num_weights(runner, choices))


def _groups(choices: _Candidates) -> list[tuple[str, ...]]:
    """The linears that get the same number format."""
    return list(dict.fromkeys(of_one_format(module, choices) for module in choices))


def _sizes(runner: LayerRunner, groups: Sequence[Sequence[str]], choices: _Candidates) -> list[list[int]]:
    """The bytes of each group with each of its candidates."""
    linears = runner.linears()

    def size(module: str, scheme: WeightScheme) -> int:
        return stored_bytes(scheme, *linears[module].weight.shape, stored_dtype(runner, module))

    return [
        [sum(map(size, group, schemes)) for schemes in zip(*(choices[one] for one in group), strict=True)]
        for group in groups
    ]


def _num_weights(runner: LayerRunner, choices: _Candidates) -> int:
    linears = runner.linears()
    return sum(linears[module].weight.numel() for module in choices)


@cache
def stored_bytes(scheme: WeightScheme, out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """The bytes of a weight [N, K] as a checkpoint stores it: codes, scales in `dtype` and zero points."""
    stored = compressed_tensors.encode("m", rtn(torch.zeros(out_features, in_features), scheme, dtype))
    return sum(tensor.nbytes for name, tensor in stored.items() if name != "m.weight_shape")


def stored_dtype(runner: LayerRunner, module: str) -> torch.dtype:
    """The dtype in which a linear's weight is stored, and its scales will be."""
    name = stored_weight(runner, module)
    return {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[runner.checkpoint.dtype(name)]


def stored_weight(runner: LayerRunner, module: str) -> str:
    """The stored tensor that holds a linear's weight."""
    return runner.head_weight if module == HEAD else f"{module}.weight"


def _bits(size: int, count: int) -> float:
    return 8 * size / count


def bytes_of(average_bits: float, count: int) -> int:
    """The most bytes of `count` weights that have so many bits on average. That a quotient was rounded, as a
    manifest's is, costs none."""
    return int(average_bits * count / 8 * (1 + 1e-15))


def _check_size(budget: Budget, least: int, count: int) -> None:
    if budget.bytes is not None and budget.bytes < least:
        raise UsageError(
            f"quantization.auto.budget: bytes {budget.bytes} are fewer than the {least} that the smallest "
            "candidates take; allow more, or add smaller candidates"
        )
    if budget.average_bits is not None and budget.average_bits < _bits(least, count):
        raise UsageError(
            f"quantization.auto.budget: average_bits {budget.average_bits} is less than the "
            f"{_bits(least, count):.3f} that the smallest candidates take, scales counted in; allow more, or "
            "add smaller candidates"
        )


def _choose(curve: Frontier, budget: Budget, count: int) -> int:
    if budget.max_kl is not None:
        point = curve.below(budget.max_kl)
    else:
        size = budget.bytes if budget.average_bits is None else bytes_of(budget.average_bits, count)
        assert size is not None
        point = curve.within(size)
    if point is None:
        raise UsageError(
            f"quantization.auto.budget: max_kl {budget.max_kl} is less than the "
            f"{float(curve.losses[-1]):.2g} that the best candidates are estimated to cost; allow more, or "
            "add larger candidates"
        )
    return point


def _point(curve: Frontier, point: int, count: int) -> Point:
    size = int(curve.sizes[point])
    return Point(average_bits=_bits(size, count), bytes=size, kl=float(curve.losses[point]))


def _shown(curve: Frontier) -> Sequence[int]:
    """Points of about evenly spread sizes, both ends among them."""
    low, high = int(curve.sizes[0]), int(curve.sizes[-1])
    wanted = [low + (high - low) * step // (_SHOWN - 1) for step in range(_SHOWN)]
    found = [curve.within(size) for size in wanted]
    return list(dict.fromkeys(point for point in found if point is not None))
