"""What a recipe would make of a model, found without its weights: which linears become what, of what size."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qtool.calibrate.layers import LayerRunner
from qtool.calibrate.skeleton import HEAD, PREFIX
from qtool.calibrate.windows import check_vocabulary, recipe_windows
from qtool.core.recipe import Recipe
from qtool.core.schemes import WeightScheme
from qtool.quantize.auto import in_features, stored_bytes, stored_dtype, stored_weight
from qtool.quantize.pipeline import open_plain, plan_for
from qtool.quantize.plan import candidates


@dataclass(frozen=True)
class Part:
    """Linears that become alike."""

    linears: tuple[str, ...]
    """Full names, in the model's order."""
    becomes: str
    """A number format, or those that ``auto`` chooses from; full precision where they stay as they are."""
    method: str
    """Empty where they stay."""
    before: int
    """Bytes of their weights."""
    least: int
    """Bytes of codes, scales and zero points, if ``auto`` took the smallest formats."""
    most: int
    """The same, if it took the largest; its budget lies between the two."""


@dataclass(frozen=True)
class Preview:
    """What becomes of a checkpoint."""

    parts: tuple[Part, ...]
    kv_cache: str | None
    untied_head: bool
    """Whether the head, which was the embedding table, gets numbers of its own beside it."""
    calibrates: bool
    """Whether anything goes by the calibration text."""
    before: int
    """Bytes of all tensors."""
    least: int
    most: int


def preview(checkpoint: Path, recipe: Recipe) -> Preview:
    """What `quantize_checkpoint` would do. Raises what that raises before any work."""
    source = open_plain(checkpoint)
    runner = LayerRunner(source)
    plan, linears = plan_for(recipe, runner), runner.linears()
    windows, _ = recipe_windows(source, recipe.calibration)
    check_vocabulary(windows, runner.vocab_size, checkpoint)
    quantization = recipe.quantization
    of_auto = candidates(quantization, in_features(runner))
    alike: dict[tuple[Sequence[WeightScheme], str, str], list[str]] = defaultdict(list)
    for module in linears:
        if module in plan.assigned:
            one = plan.assigned[module]
            alike[(one.scheme,), str(one.computes_with), one.method.name].append(module)
        elif module in of_auto and quantization.auto is not None:
            formats, method = " or ".join(map(str, of_auto[module])), quantization.auto.method.name
            alike[of_auto[module], formats, method].append(module)
        else:
            alike[(), "full precision", ""].append(module)
    shapes = {module: linear.weight.shape for module, linear in linears.items()}
    parts = tuple(_part(runner, {name: shapes[name] for name in names}, *key) for key, names in alike.items())
    table = source.num_bytes(runner.head_weight) if runner.tied else 0
    with_head = HEAD in plan.assigned or HEAD in of_auto
    stays = 0 if with_head else table
    before = sum(map(source.num_bytes, source))
    rest = before - sum(part.before for part in parts) + table
    return Preview(
        parts=parts,
        kv_cache=None if plan.kv_cache is None else str(plan.kv_cache),
        untied_head=runner.tied and with_head,
        calibrates=bool(of_auto) or any(map(plan.calibrates, (PREFIX, HEAD))),
        before=before,
        least=rest + sum(part.least for part in parts) - stays,
        most=rest + sum(part.most for part in parts) - stays,
    )


def _part(
    runner: LayerRunner,
    shapes: Mapping[str, Sequence[int]],
    schemes: Sequence[WeightScheme],
    becomes: str,
    method: str,
) -> Part:
    before = least = most = 0
    for name, shape in shapes.items():
        size, dtype = runner.checkpoint.num_bytes(stored_weight(runner, name)), stored_dtype(runner, name)
        sizes = [stored_bytes(scheme, *shape, dtype) for scheme in schemes] or [size]
        before, least, most = before + size, least + min(sizes), most + max(sizes)
    return Part(tuple(shapes), becomes, method, before, least, most)
