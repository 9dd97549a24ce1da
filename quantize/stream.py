"""Take calibration windows through a model, quantizing each layer for what the layers before it make."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from qtool.calibrate.experts import expert_of, showing_all
from qtool.calibrate.hidden import HiddenStates, hold
from qtool.calibrate.kv import KvRanges, KvRounding
from qtool.calibrate.layers import CPU, LayerRunner, checkpoint_weights
from qtool.calibrate.replay import Replay, silenced
from qtool.calibrate.skeleton import COMPUTED, HEAD, PREFIX
from qtool.calibrate.statistics import Collector, InputStatistics
from qtool.core.activation import Activation
from qtool.core.checkpoint import Checkpoint
from qtool.core.formats.kv_cache import KvLayout
from qtool.core.manifest import LinearRecord
from qtool.core.memory import release_freed_memory
from qtool.errors import QtoolError, UsageError
from qtool.quantize.correction import measure_error
from qtool.quantize.experts import complete
from qtool.quantize.head import quantize_head
from qtool.quantize.layer import LoadedLayer, QuantizedLayer, quantize_layer
from qtool.quantize.plan import Assignment, Plan
from qtool.quantize.progress import Report
from qtool.quantize.work import WorkFolder, attention_of


def run_layers(
    runner: LayerRunner,
    windows: Tensor,
    plan: Plan,
    work: WorkFolder,
    progress: Report,
    *,
    spill: Path | None = None,
    devices: Sequence[torch.device] = (CPU,),
) -> dict[str, LinearRecord]:
    """Finish every layer that `work` does not hold yet, and then the head; the records of all of them.

    Hidden states are in memory, or in files in the folder `spill`. They are taken no further than to the last
    part that the plan calibrates and `work` does not hold. The linears of a layer are spread over `devices`.
    """
    head, depth = plan.assigned.get(HEAD), _depth(plan, work, len(runner))
    total = len(runner) + (head is not None)
    progress(0, total, None)
    hidden = hold(runner.embedded(windows), len(windows), spill) if depth else torch.empty(0, device="cpu")
    reference = hold(hidden, len(hidden), spill) if depth and plan.corrects else None
    release_freed_memory()
    records: dict[str, LinearRecord] = {}
    for index in range(len(runner)):
        # What attention gives is as large as the hidden states: where those are on disk, it is computed anew.
        attention = _attention(runner, index, plan) if spill is None else Replay(None)
        corrected = reference if index < depth else None
        if not work.has(index):
            work.save(index, _quantize_layer(runner, index, hidden, corrected, plan, attention, devices))
        elif corrected is not None:
            with runner.layer(index, checkpoint_weights(runner.checkpoint)):
                runner.advance(index, corrected)
        finished = work.records(index)
        records |= finished
        if index + 1 < depth:
            with attention.playing():
                _advance(runner, index, hidden, plan, work)
        release_freed_memory()
        progress(index + 1, total, _mean_db(finished))
    if head is not None:
        if not work.has(len(runner)):
            seen = hidden if plan.calibrates(HEAD) else None
            work.save(len(runner), quantize_head(runner, windows, seen, head))
        finished = work.records(len(runner))
        records |= finished
        progress(total, total, _mean_db(finished))
    return records


def _depth(plan: Plan, work: WorkFolder, layers: int) -> int:
    """How many layers the calibration text has yet to come to, the head counted as the last; 0: to none."""
    parts = [*(f"{PREFIX}.{index}" for index in range(layers)), HEAD]
    places = [place for place, part in enumerate(parts) if plan.calibrates(part) and not work.has(place)]
    return max(places, default=-1) + 1


def _mean_db(records: Mapping[str, LinearRecord]) -> float | None:
    return sum(one.sqnr_db for one in records.values()) / len(records) if records else None


def _attention(runner: LayerRunner, index: int, plan: Plan) -> Replay:
    """The outputs of the layer's attention, where quantizing the layer leaves that as it is."""
    name = attention_of(index)
    changed = plan.kv_cache is not None or any(linear.startswith(f"{name}.") for linear in plan.assigned)
    return Replay(None if changed else dict(runner.model.named_modules()).get(name))


def _advance(runner: LayerRunner, index: int, hidden: HiddenStates, plan: Plan, work: WorkFolder) -> None:
    """Take the hidden states through a finished layer, rounding what an engine will round."""
    with runner.layer(index, work.weights(index, plan.assigned)):
        linears = runner.linears()
        activations = work.activations(index, plan.assigned)
        cache = None
        if plan.kv_cache is not None:
            cache = KvRounding(plan.kv_cache, work.kv_scales(index, KvLayout(plan.kv_cache)))
        with _rounding_inputs({linears[module]: one for module, one in activations.items()}):
            runner.advance(index, hidden, cache)


def _quantize_layer(
    runner: LayerRunner,
    index: int,
    hidden: HiddenStates,
    reference: HiddenStates | None,
    plan: Plan,
    attention: Replay,
    devices: Sequence[torch.device],
) -> QuantizedLayer:
    """Quantize layer `index`, given what comes to it; `reference` is taken through it as it was."""
    prefix = f"{PREFIX}.{index}"
    chosen = {module: one for module, one in plan.assigned.items() if module.startswith(f"{prefix}.")}
    with runner.layer(index, checkpoint_weights(runner.checkpoint)) as module:
        with attention.recording():
            statistics, kv_scales = _calibrate(runner, index, hidden, chosen, plan)
        release_freed_memory()
        output_error = None
        if reference is not None:
            runner.advance(index, reference)
        if reference is not None and plan.calibrates(prefix):
            output_error = partial(measure_error, runner, index, hidden, reference, attention)
        layer = LoadedLayer(
            prefix,
            module,
            _stored_dtypes(runner.checkpoint, prefix),
            lambda: runner.update(index, hidden[0]),
            output_error,
        )
        quantized = quantize_layer(layer, chosen, statistics, devices)
    return QuantizedLayer(quantized.tensors | kv_scales, quantized.records)


def _calibrate(
    runner: LayerRunner, index: int, hidden: HiddenStates, chosen: Mapping[str, Assignment], plan: Plan
) -> tuple[dict[str, InputStatistics], dict[str, Tensor]]:
    """What the linears of the loaded layer see, and the tensors that hold the scales of its KV cache."""
    if not plan.calibrates(f"{PREFIX}.{index}"):
        return {}, {}
    collector, ranges = Collector(), KvRanges() if plan.kv_cache is not None else None
    linears = runner.linears()
    with ExitStack() as watched:
        watched.enter_context(collector.watching({module: linears[module] for module in chosen}))
        if plan.all_experts:
            watched.enter_context(showing_all(runner.model.model.layers[index]))
        states = iter(hidden)
        _run(runner, index, islice(states, 1), ranges)
        idle = _last(collector.seen, index)
        with silenced(linears[idle]) if idle else nullcontext():
            _run(runner, index, states, ranges)
    statistics = complete(collector.statistics(), {module: linears[module].in_features for module in chosen})
    unseen = next((module for module in chosen if module not in statistics), None)
    if unseen is not None:
        raise QtoolError(f"{unseen}: saw no token of the calibration text; calibrate on more, or other, text")
    if plan.kv_cache is None or ranges is None:
        return statistics, {}
    if not ranges.seen:
        raise UsageError(f"{PREFIX}.{index}: hands no keys and values to a cache; drop quantization.kv_cache")
    scales = ranges.scales(plan.kv_cache)
    return statistics, KvLayout(plan.kv_cache).store(attention_of(index), scales)


def _run(runner: LayerRunner, index: int, states: Iterator[Tensor], ranges: KvRanges | None) -> None:
    for _ in runner.run(index, states, ranges):
        pass


def _last(seen: Sequence[str], index: int) -> str | None:
    """The linear, among those `seen` in this order, that nothing else waits for: behind attention the last,
    unless experts take turns."""
    if not seen or seen[-1].startswith(f"{attention_of(index)}.") or any(map(expert_of, seen)):
        return None
    return seen[-1]


def _stored_dtypes(source: Checkpoint, prefix: str) -> dict[str, torch.dtype]:
    """The dtype of every tensor that the checkpoint holds of a layer."""
    names = [name for name in source if name.startswith(f"{prefix}.") and not name.endswith(COMPUTED)]
    return {name: source.tensor(name).dtype for name in names}


@contextmanager
def _rounding_inputs(activations: Mapping[nn.Linear, Activation]) -> Iterator[None]:
    """Round what comes to linears while the block runs the model."""
    with ExitStack() as hooks:
        for linear, activation in activations.items():
            hook = linear.register_forward_pre_hook(
                lambda _, args, how=activation: (how.fake_quantize(args[0]),)
            )
            hooks.callback(hook.remove)
        yield
