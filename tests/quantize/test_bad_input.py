"""Damaged checkpoints, full disks and runs that meet: refused by name, with nothing half done left."""

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.core.checkpoint import INDEX, SINGLE, Checkpoint
from qtool.core.recipe import Recipe
from qtool.errors import QtoolError, UsageError
from qtool.quantize import pipeline, work, writing
from qtool.quantize.pipeline import quantize_checkpoint
from qtool.quantize.writing import LazyTensor
from tests.quantize.test_pipeline import TEXT, contents, recipe_of


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def sharded(tiny_copy: Path) -> Path:
    """The tiny checkpoint, a shard for each layer and one for the rest."""
    tensors = load_file(tiny_copy / SINGLE)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        shard = f"{name.split('.')[2]}.safetensors" if ".layers." in name else "rest.safetensors"
        shards.setdefault(shard, {})[name] = tensor
    for shard, members in shards.items():
        save_file(members, tiny_copy / shard, {"format": "pt"})
    (tiny_copy / SINGLE).unlink()
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (tiny_copy / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return tiny_copy


def filling_up(at: int) -> Callable[[Path, Sequence[LazyTensor], dict[str, str]], None]:
    """`write_safetensors` on a disk that is full in the middle of the file number `at`."""
    write, files = writing.write_safetensors, 0

    def write_some(path: Path, tensors: Sequence[LazyTensor], metadata: dict[str, str]) -> None:
        nonlocal files
        files += 1
        write(path, tensors, metadata)
        if files == at:
            path.write_bytes(path.read_bytes()[:-7])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return write_some


@pytest.mark.parametrize(("room", "shard"), [(work, 1), (work, 3), (writing, 1), (writing, 2)])
def test_a_disk_that_is_full_at_any_shard_leaves_no_output_and_the_run_resumes_to_the_same_bytes(
    tiny: Path, text: Path, tmp_path: Path, room: ModuleType, shard: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, output = recipe_of(text, "gptq"), tmp_path / "out"
    with monkeypatch.context() as full:
        full.setattr(room, "write_safetensors", filling_up(shard))
        with pytest.raises(QtoolError, match=r"out\.partial: could not be written \(No space left"):
            quantize_checkpoint(tiny, recipe, output, shard_bytes=100_000)
    assert not output.exists()
    quantize_checkpoint(tiny, recipe, output, shard_bytes=100_000)
    quantize_checkpoint(tiny, recipe, tmp_path / "straight", shard_bytes=100_000)
    assert contents(output) == contents(tmp_path / "straight")
    assert not list(tmp_path.glob("*.partial"))


def test_a_second_run_into_the_folder_is_refused_and_the_first_ends_well(
    tiny: Path, text: Path, tmp_path: Path
) -> None:
    recipe, refused = recipe_of(text), 0

    def start_another(done: int, total: int, sqnr_db: float | None) -> None:
        nonlocal refused
        with pytest.raises(UsageError, match=r"out\.partial: another run is working there"):
            quantize_checkpoint(tiny, recipe, tmp_path / "out")
        refused += 1

    quantize_checkpoint(tiny, recipe, tmp_path / "out", progress=start_another)
    quantize_checkpoint(tiny, recipe, tmp_path / "alone")
    assert refused == 4  # before the first of three layers, and after each
    assert contents(tmp_path / "out") == contents(tmp_path / "alone")


def remove(shard: Path) -> None:
    shard.unlink()


def truncate(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[:-1])


def garble(shard: Path) -> None:
    """The header."""
    content = shard.read_bytes()
    shard.write_bytes(content[:9] + b"\xff" * 20 + content[29:])


def spoil(shard: Path) -> None:
    """The last number of the last tensor: a NaN."""
    content = shard.read_bytes()
    shard.write_bytes(content[:-4] + b"\xff\xff\xff\x7f")


def swap(shard: Path) -> None:
    """The whole file, for another layer's."""
    shard.write_bytes((shard.parent / "0.safetensors").read_bytes())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove, r"1\.safetensors: is missing, though"),
        (truncate, r"1\.safetensors: is truncated or no safetensors file"),
        (garble, r"1\.safetensors: is truncated or no safetensors file"),
        (spoil, r"model\.layers\.1\..*: holds NaN or infinite weights"),
        (swap, r"1\.safetensors: holds model\.layers\.0\..*, which .* places in 0\.safetensors"),
    ],
)
def test_a_damaged_shard_is_an_error_that_names_it_and_no_output_appears(
    sharded: Path, text: Path, tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    damage(sharded / "1.safetensors")
    with pytest.raises(QtoolError, match=said):
        quantize_checkpoint(sharded, recipe_of(text), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_what_is_only_copied_is_looked_at_too(
    tiny_copy: Path, text: Path, tmp_path: Path, method: str, name: str
) -> None:
    tensors = load_file(tiny_copy / SINGLE)
    tensors[name][0] = torch.nan  # of a token that the text has not
    save_file(tensors, tiny_copy / SINGLE, {"format": "pt"})
    with pytest.raises(QtoolError, match=rf"{name}: holds NaN or infinite"):
        quantize_checkpoint(tiny_copy, recipe_of(text, method), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_shard_that_changed_while_a_run_was_stopped_is_noticed(
    sharded: Path, text: Path, tmp_path: Path
) -> None:
    def stop(done: int, total: int, sqnr_db: float | None) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(sharded, recipe_of(text), tmp_path / "out", progress=stop)
    tensors = load_file(sharded / "0.safetensors")  # of a layer that is finished
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(tensors, sharded / "0.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"out\.partial: was begun with another checkpoint; give"):
        quantize_checkpoint(sharded, recipe_of(text), tmp_path / "out")


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("rtn", {"symmetric": True}),
        ("awq", {}),
        ("gptq", {}),
        ("awq+gptq", {"symmetric": True}),
        ("smoothquant", {"num_bits": 8}),
        ("best", {}),
        ("rtn", {"format": "fp8"}),
        ("awq", {"format": "fp8", "granularity": "tensor"}),
        ("awq", {"format": "mxfp4"}),
        ("awq", {"format": "nvfp4"}),
    ],
)
def test_linears_of_zeros_alone_stay_zero(
    tiny_copy: Path, text: Path, tmp_path: Path, method: str, weights: dict[str, Any]
) -> None:
    tensors = load_file(tiny_copy / SINGLE)
    zeros = [f"model.layers.1.mlp.{name}" for name in ("gate_proj", "down_proj")]
    for name in zeros:
        tensors[f"{name}.weight"].zero_()
    save_file(tensors, tiny_copy / SINGLE, {"format": "pt"})
    manifest = quantize_checkpoint(tiny_copy, recipe_of(text, method, **weights), tmp_path / "out")
    written = Checkpoint(tmp_path / "out")
    for name in zeros:
        assert not written.linear(name).dense().any()
        assert manifest.linears[name].sqnr_db == 200  # nothing lost: the most that is reported


def killed_when_written(tiny: Path, recipe: Recipe, output: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that was stopped when its checkpoint was written, and had its name yet to get."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(pipeline.Manifest, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(tiny, recipe, output)
    return output.with_name(f"{output.name}.partial")


@pytest.mark.parametrize("name", ["thesis.txt", "layer-00003.safetensors", "layer-99.safetensors", "data/"])
def test_what_others_put_beside_the_work_stays_and_is_named(
    name: str,
    tiny: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = killed_when_written(tiny, recipe_of(text, "rtn"), tmp_path / "out", monkeypatch)
    foreign = folder / name
    foreign.mkdir() if name.endswith("/") else foreign.write_bytes(b"years of work")
    quantize_checkpoint(tiny, recipe_of(text, "rtn"), tmp_path / "out")
    assert list(folder.iterdir()) == [foreign]
    assert f"out.partial: is left, since it holds {foreign.name}, which qtool did not write" in caplog.text
    quantize_checkpoint(tiny, recipe_of(text, "rtn"), tmp_path / "straight")
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")


def test_a_folder_where_a_layer_should_be_is_named(
    tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = killed_when_written(tiny, recipe_of(text, "rtn"), tmp_path / "out", monkeypatch)
    layer = folder / "layer-00001.safetensors"
    layer.unlink()
    layer.mkdir()
    with pytest.raises(QtoolError, match=rf"{layer}: cannot be used \(Is a directory\)\. Put that right"):
        quantize_checkpoint(tiny, recipe_of(text, "rtn"), tmp_path / "out")


@pytest.mark.parametrize("name", ["thesis.txt", "data/", "model-1.safetensors", "config.json/", ""])
def test_what_is_in_the_way_of_the_checkpoint_is_refused_before_any_work(
    name: str, tiny: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = killed_when_written(tiny, recipe_of(text, "rtn"), tmp_path / "out", monkeypatch)
    foreign = folder / "checkpoint" / name
    if not name:
        foreign.rename(folder / "moved")
    if name.endswith("/"):
        foreign.unlink(missing_ok=True)
        foreign.mkdir()
    else:
        foreign.write_bytes(b"years of work")
    told: list[int] = []
    with pytest.raises(UsageError, match=rf"{foreign}: is in the way .* move it away, then give the same"):
        quantize_checkpoint(
            tiny, recipe_of(text, "rtn"), tmp_path / "out", progress=lambda done, *_: told.append(done)
        )
    assert not told
    foreign.rename(tmp_path / "mine")
    quantize_checkpoint(tiny, recipe_of(text, "rtn"), tmp_path / "out")
