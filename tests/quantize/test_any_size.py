"""Models that do not fit into memory: hidden states on disk, weights that leave memory, no run in vain."""

import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qtool.calibrate.hidden import SpilledStates
from qtool.calibrate.layers import LayerRunner
from qtool.core.checkpoint import Checkpoint
from qtool.core.recipe import Recipe, override
from qtool.errors import QtoolError
from qtool.quantize.pipeline import quantize_checkpoint
from tests.quantize.test_pipeline import contents, recipe_of, text

__all__ = ["text"]  # a fixture

TIGHT = 1
"""A byte of memory: nothing stays in it that need not."""


def correcting(recipe: Recipe) -> Recipe:
    rule = override(recipe.quantization.rules[0], method={"name": "awq+gptq", "correct": True})
    return override(recipe, quantization=override(recipe.quantization, rules=[rule]))


def quantizing_cache(recipe: Recipe) -> Recipe:
    return override(recipe, quantization=override(recipe.quantization, kv_cache="int8"))


@pytest.mark.parametrize("kind", ["gptq", "corrects", "all linears", "head", "kv cache", "rtn"])
def test_hidden_states_on_disk_give_the_same_bytes(
    tiny: Path, text: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = {
        "gptq": recipe_of(text, "gptq"),
        "corrects": correcting(recipe_of(text)),
        "all linears": recipe_of(text, "best", targets="*"),
        "head": recipe_of(text, "awq", targets="*", keep=[]),
        "kv cache": quantizing_cache(recipe_of(text, "gptq")),
        "rtn": recipe_of(text, "rtn"),
    }[kind]
    quantize_checkpoint(tiny, recipe, tmp_path / "memory")
    spilled: list[SpilledStates] = []
    reserve = SpilledStates.__init__

    def note(self: SpilledStates, folder: Path, count: int, shape: tuple[int, ...]) -> None:
        spilled.append(self)
        assert folder == tmp_path / "disk.partial"
        reserve(self, folder, count, shape)

    monkeypatch.setattr(SpilledStates, "__init__", note)
    quantize_checkpoint(tiny, recipe, tmp_path / "disk", max_memory=TIGHT)
    assert len(spilled) == {"corrects": 2, "rtn": 0}.get(kind, 1)
    assert contents(tmp_path / "memory") == contents(tmp_path / "disk")


def test_memory_that_is_enough_is_used(
    tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = 5 * 24 * 96 * 4  # five windows of 24 tokens, 96 numbers each, in float32

    def refuse(*_: object) -> None:
        raise AssertionError("on disk")

    monkeypatch.setattr(SpilledStates, "__init__", refuse)
    quantize_checkpoint(tiny, recipe_of(text, "gptq"), tmp_path / "out", max_memory=4 * 2 * states)
    with pytest.raises(AssertionError, match="on disk"):
        quantize_checkpoint(tiny, recipe_of(text, "gptq"), tmp_path / "less", max_memory=4 * 2 * states - 1)


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from qtool.calibrate.hidden import SpilledStates
from qtool.core.recipe import Recipe
from qtool.quantize.pipeline import quantize_checkpoint

checkpoint, recipe, output, moment, threads = sys.argv[1:]
write, done = SpilledStates.__setitem__, 0

def write_and_count(self, window, state):
    global done
    done += 1
    write(self, window, state[: len(state) // 2] if done == int(moment) else state)
    if done == int(moment):
        os.kill(os.getpid(), signal.SIGKILL)

SpilledStates.__setitem__ = write_and_count
torch.set_num_threads(int(threads))  # sums depend on it in their last digit
quantize_checkpoint(Path(checkpoint), Recipe.model_validate_json(recipe), Path(output), max_memory=1)
"""


def test_a_run_killed_again_and_again_while_it_spills_ends_with_the_same_bytes(
    tiny: Path, text: Path, tmp_path: Path
) -> None:
    recipe, output = correcting(recipe_of(text)), tmp_path / "killed"
    moments = random.Random(0)
    for _ in range(3):
        # 5 windows are written twice at first, and twice again in each of 3 layers but the last
        moment = str(moments.randint(1, 35))
        threads = str(torch.get_num_threads())
        arguments = [str(tiny), recipe.model_dump_json(), str(output), moment, threads]
        assert (
            subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False).returncode
            == -signal.SIGKILL
        ), moment
        assert not output.exists()
        left = {file.name for file in (tmp_path / "killed.partial").iterdir()}
        parts = (f"layer-{index:05}.{kind}" for index in range(3) for kind in ("safetensors", "sha256"))
        assert left <= {"lock", "state.json", *parts}
    quantize_checkpoint(tiny, recipe, output, max_memory=TIGHT)
    quantize_checkpoint(tiny, recipe, tmp_path / "straight")
    assert contents(output) == contents(tmp_path / "straight")


def test_a_disk_without_room_for_hidden_states_is_an_error_and_the_run_resumes(
    tiny: Path, text: Path, tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, limits[1]))  # windows take 46,080 bytes
    try:
        with pytest.raises(QtoolError, match=r"out\.partial: could not be written \(File too large\)"):
            quantize_checkpoint(tiny, recipe_of(text, "gptq"), tmp_path / "out", max_memory=TIGHT)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").exists()
    quantize_checkpoint(tiny, recipe_of(text, "gptq"), tmp_path / "out", max_memory=TIGHT)
    assert Checkpoint(tmp_path / "out").schemes()


@pytest.fixture
def layers_run(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The layers that compute something, noted as they do; -1 is the embedding."""
    run: set[int] = set()
    call, embedded = LayerRunner.call, LayerRunner.embedded

    def note_call(self: LayerRunner, index: int, window: Tensor, cache: None = None) -> Tensor:
        run.add(index)
        return call(self, index, window, cache)

    def note_embedded(self: LayerRunner, windows: Tensor) -> Iterator[Tensor]:
        run.add(-1)
        return embedded(self, windows)

    monkeypatch.setattr(LayerRunner, "call", note_call)
    monkeypatch.setattr(LayerRunner, "embedded", note_embedded)
    return run


@pytest.mark.parametrize(
    ("method", "targets", "computed"),
    [
        ("rtn", "*", set()),
        ("gptq", "model.layers.0.mlp.*", {-1, 0}),
        ("gptq", "model.layers.1.mlp.*", {-1, 0, 1}),
        ("gptq", "lm_head", {-1, 0, 1, 2}),
        ("rtn", "lm_head", set()),
    ],
)
def test_the_text_goes_no_further_than_to_the_last_layer_that_needs_it(
    tiny: Path,
    text: Path,
    tmp_path: Path,
    method: str,
    targets: str,
    computed: set[int],
    layers_run: set[int],
) -> None:
    recipe = recipe_of(text, method, targets=targets, keep=["*.embed_tokens"])
    manifest = quantize_checkpoint(tiny, recipe, tmp_path / "out")
    assert layers_run == computed
    assert {one.tokens for one in manifest.linears.values()} == {0 if method == "rtn" else 5 * 24}


@pytest.mark.parametrize(("stopped_after", "computed"), [(1, {-1, 0, 1}), (2, set()), (3, set())])
def test_a_resumed_run_computes_nothing_that_no_open_layer_needs(
    tiny: Path,
    text: Path,
    tmp_path: Path,
    layers_run: set[int],
    stopped_after: int,
    computed: set[int],
) -> None:
    recipe, output = correcting(recipe_of(text, targets="re:.*layers.[01].mlp.*")), tmp_path / "out"

    def stop(done: int, total: int, sqnr_db: float | None) -> None:
        if done == stopped_after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(tiny, recipe, output, progress=stop)
    layers_run.clear()
    quantize_checkpoint(tiny, recipe, output)
    assert layers_run == computed
    quantize_checkpoint(tiny, recipe, tmp_path / "straight")
    assert contents(output) == contents(tmp_path / "straight")


def test_static_ranges_of_inputs_are_calibrated_whatever_the_method(
    tiny: Path, text: Path, tmp_path: Path, layers_run: set[int]
) -> None:
    recipe = recipe_of(text, "rtn", num_bits=8)
    rule = override(recipe.quantization.rules[0], activations={"format": "int8", "dynamic": False})
    quantize_checkpoint(tiny, override(recipe, quantization={"rules": [rule]}), tmp_path / "static")
    assert layers_run == {-1, 0, 1, 2}
    layers_run.clear()
    rule = override(recipe.quantization.rules[0], activations={"format": "int8", "dynamic": True})
    quantize_checkpoint(tiny, override(recipe, quantization={"rules": [rule]}), tmp_path / "dynamic")
    assert not layers_run


def test_what_nothing_has_seen_is_judged_by_its_weights(tiny: Path, text: Path, tmp_path: Path) -> None:
    recipe = recipe_of(text, "rtn")
    (rule,) = recipe.quantization.rules
    rules = [override(rule, targets=["*.0.*"], method="gptq"), override(rule, targets=["*"])]
    manifest = quantize_checkpoint(tiny, override(recipe, quantization={"rules": rules}), tmp_path / "out")
    before, after = Checkpoint(tiny), Checkpoint(tmp_path / "out")
    for name, one in manifest.linears.items():
        if ".0." not in name:
            weight = before.linear(name).dense().float()
            lost = after.linear(name).dense().float() - weight
            expected = 10 * torch.log10(weight.square().sum() / lost.square().sum())
            assert one.sqnr_db == pytest.approx(float(expected), abs=0.01)
        assert one.tokens == (5 * 24 if ".0." in name else 0)


def resident(path: Path) -> int:
    """Bytes of a file that this process holds in memory through mappings."""
    total, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            counted = line.endswith(str(path))
        elif counted and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_weights_that_were_read_leave_memory(tiny: Path, tmp_path: Path) -> None:
    own = shutil.copytree(tiny, tmp_path / "own")  # other tests may hold mappings of the one they share
    checkpoint, file = Checkpoint(own), own / "model.safetensors"
    size = file.stat().st_size
    held = {name: checkpoint.tensor(name).clone() for name in checkpoint}
    assert sum(tensor.nbytes for tensor in held.values()) > 0.9 * size
    assert resident(file) < size / 4  # a little, by reading ahead, of what tells which tensors there are
    mapped = [checkpoint.tensor(name) for name in checkpoint]
    assert sum(float(tensor.abs().sum()) for tensor in mapped) > 0
    assert resident(file) > size / 2
