"""Quantize a checkpoint by a recipe, layer by layer, each seeing what the quantized layers before it make."""

import json
import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from qtool.calibrate.experts import routers
from qtool.calibrate.layers import CPU, LayerRunner
from qtool.calibrate.skeleton import HEAD, PREFIX
from qtool.calibrate.windows import check_vocabulary, recipe_windows
from qtool.core.checkpoint import COMPANIONS, Checkpoint
from qtool.core.files import refuse_existing, sha256
from qtool.core.formats import compressed_tensors
from qtool.core.manifest import Manifest, versions
from qtool.core.memory import available_memory, release_freed_memory
from qtool.core.recipe import Quantization, Recipe, matches
from qtool.errors import UsageError
from qtool.quantize.auto import check_budget, in_features, kept_allocation, shared_out
from qtool.quantize.plan import Plan, assign, candidates
from qtool.quantize.progress import Report, silent
from qtool.quantize.stream import run_layers
from qtool.quantize.work import WorkFolder, lazy, work_folder
from qtool.quantize.writing import write_weights

_SHARD_BYTES = 4_000_000_000
_HIDDEN_SHARE = 4
"""Hidden states may take one part in so many of the memory: a layer in float32 and the Hessian of its widest
linear want the rest."""


def quantize_checkpoint(
    checkpoint: Path,
    recipe: Recipe,
    output: Path,
    *,
    progress: Report = silent,
    shard_bytes: int = _SHARD_BYTES,
    max_memory: int | None = None,
    devices: Sequence[torch.device] = (CPU,),
) -> Manifest:
    """Quantize the checkpoint folder as `recipe` says and write a new one at `output`.

    Memory holds a layer or two and the windows' hidden states, never the whole model; on disk are the states
    that would take more than a quarter of `max_memory` bytes, which are what is available if none are given.
    Layers run on the first of `devices`, and the linears of each are spread over all of them. Finished layers
    wait in ``OUTPUT.partial``, so the same call after a crash resumes there and ends with the same bytes;
    `output` appears whole, at the end. Raises UsageError for a recipe that does not fit the model, an output
    that exists or is being written by another run, and QtoolError for a damaged checkpoint or a full disk.
    """
    started = time.monotonic()
    refuse_existing(output)
    source = open_plain(checkpoint)
    runner = LayerRunner(source, fast=True, device=devices[0])
    plan = plan_for(recipe, runner)
    windows, text_digest = recipe_windows(source, recipe.calibration)
    check_vocabulary(windows, runner.vocab_size, checkpoint)
    release_freed_memory()  # a tokenizer and what it makes of a text take a hundred megabytes
    checksums = {path.name: sha256(path) for path in source.files}
    decides = _decides(recipe, checksums, text_digest, devices[0])
    with work_folder(output, decides, _num_parts(recipe, runner, plan)) as work:
        allocation = None
        if recipe.quantization.auto is not None:
            allocation = kept_allocation(source, windows, recipe, work, progress)
            plan = shared_out(plan, recipe.quantization, allocation, in_features(runner))
        spill = work.path if _outgrow(runner, windows, plan, max_memory) else None
        records = run_layers(runner, windows, plan, work, progress, spill=spill, devices=devices)
        folder = work.new_checkpoint()
        _write_checkpoint(runner, plan, work, folder, shard_bytes)
        manifest = Manifest(
            recipe=recipe,
            inputs=checksums | {recipe.calibration.dataset: text_digest},
            outputs={path.name: sha256(path) for path in sorted(folder.iterdir())},
            versions=versions(),
            seed=recipe.calibration.seed,
            linears=records,
            allocation=allocation,
            untied_head=runner.tied and HEAD in records,
            seconds=time.monotonic() - started,
            peak_memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        )
        manifest.save(folder)
        work.finish(folder)
    return manifest


def open_plain(checkpoint: Path) -> Checkpoint:
    """Open a checkpoint to be quantized. Raises UsageError when it is quantized already."""
    source = Checkpoint(checkpoint)
    if source.format is not None:
        raise UsageError(f"{checkpoint}: is quantized already; name the checkpoint that it was made from")
    return source


def plan_for(recipe: Recipe, runner: LayerRunner) -> Plan:
    """What a recipe's rules say for a model, and all of it checked, that of ``auto`` too.

    Raises UsageError for what does not fit the model.
    """
    linears = in_features(runner)
    _refuse_plain(recipe.quantization, runner)
    if recipe.calibration.all_experts and not routers(runner.model):
        raise UsageError("calibration.all_experts: the model has no experts; drop it")
    assigned = assign(recipe.quantization, linears)
    of_auto = candidates(recipe.quantization, linears)
    quantized = [*assigned, *of_auto]
    outside = [module for module in quantized if module != HEAD and not module.startswith(f"{PREFIX}.")]
    if outside:
        raise UsageError(
            f"quantization: {outside[0]} lies outside {PREFIX} and stays in full precision; "
            f"add {outside[0]!r} to quantization.keep"
        )
    if recipe.quantization.auto is not None:
        check_budget(runner, recipe.quantization.auto.budget, of_auto)
    kv_cache = recipe.quantization.kv_cache
    return Plan(
        assigned, None if kv_cache is None else kv_cache.scheme, all_experts=recipe.calibration.all_experts
    )


def _refuse_plain(quantization: Quantization, runner: LayerRunner) -> None:
    """Say why, where a target means an embedding table or a router alone: neither is a linear, so none would
    match."""
    tables = [name for name, part in runner.model.named_modules() if isinstance(part, nn.Embedding)]
    table = f"since engines look tokens up in plain tables; {HEAD} can be quantized" + (
        ", which then gets a matrix of its own" if runner.tied else ""
    )
    router = "since it is small, and errors in it send tokens to other experts; target linears of experts"
    reasons = dict.fromkeys(tables, table) | dict.fromkeys(routers(runner.model), router)
    targets = [target for rule in quantization.rules for target in rule.targets]
    for target in targets + list(quantization.auto.targets if quantization.auto else ()):
        plain = next((name for name in reasons if matches(target, name)), None)
        if plain is not None and not any(matches(target, name) for name in runner.linears()):
            raise UsageError(
                f"quantization: target {target!r} is {plain}, which stays in full precision, {reasons[plain]}"
            )


def _num_parts(recipe: Recipe, runner: LayerRunner, plan: Plan) -> int:
    """The layers, and the head where it is quantized."""
    of_auto = candidates(recipe.quantization, in_features(runner))
    return len(runner) + (HEAD in plan.assigned or HEAD in of_auto)


def _outgrow(runner: LayerRunner, windows: Tensor, plan: Plan, max_memory: int | None) -> bool:
    """Whether hidden states would take more memory than their share: once as they are, once as what attention
    makes of them, and where errors are corrected once more for the full-precision model."""
    states = windows.numel() * runner.hidden_size * torch.float32.itemsize * (3 if plan.corrects else 2)
    return states > (available_memory() if max_memory is None else max_memory) / _HIDDEN_SHARE


def _decides(
    recipe: Recipe, checksums: Mapping[str, str], text_digest: str, device: torch.device
) -> dict[str, object]:
    """All that decides the bytes that come out. GPUs and CPUs sum up in orders of their own."""
    of_recipe = recipe.model_dump(mode="json")
    return {
        **{f"{part} (of the recipe, or by options)": value for part, value in of_recipe.items()},
        "checkpoint": dict(checksums),
        "calibration text": text_digest,
        "version of qtool or a library": versions(),
        "kind of device": device.type,
    }


def _write_checkpoint(
    runner: LayerRunner, plan: Plan, work: WorkFolder, folder: Path, shard_bytes: int
) -> None:
    source, parts = runner.checkpoint, [f"{PREFIX}."] + ([f"{HEAD}."] if HEAD in plan.assigned else [])
    tensors = [lazy(name, source.tensor) for name in sorted(source) if not name.startswith(tuple(parts))]
    finished = range(len(runner) + len(parts) - 1)
    write_weights(folder, tensors, shard_bytes, {work.part(index): work.tensors(index) for index in finished})
    plain = [*runner.linears(), *routers(runner.model)]
    dense = [module for module in plain if module not in plan.assigned]
    schemes = {module: one.computes_with for module, one in plan.assigned.items()}
    config = source.config | {"quantization_config": compressed_tensors.config(schemes, dense, plan.kv_cache)}
    if HEAD in schemes:
        config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for name in COMPANIONS:
        if (source.path / name).is_file():
            shutil.copyfile(source.path / name, folder / name)
