import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from qtool.errors import QtoolError
from qtool.quantize.work import lazy
from qtool.quantize.writing import PYTORCH, LazyTensor, write_safetensors, write_weights


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "bytes": torch.randint(-128, 127, (3,), dtype=torch.int8),
        "b": torch.randn(7, 5).to(torch.bfloat16),
        "a": torch.randn(5, 3).T,
        "shape": torch.tensor([7, 5]),
        "flag": torch.tensor(True),
        "empty": torch.zeros(0, 4, dtype=torch.float16),
    }


def stored(tensors: dict[str, Tensor]) -> list[LazyTensor]:
    return [lazy(name, tensors.__getitem__) for name in tensors]


def read(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as handle:
            assert handle.metadata()["format"] == "pt"
            for name in handle.keys():  # noqa: SIM118 - no mapping
                yield name, handle.get_tensor(name)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_safetensors_reads_back_what_was_written(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write_safetensors(tmp_path / "one", stored(tensors), {"format": "pt"})
    assert_same(dict(read([tmp_path / "one"])), tensors)


def test_every_tensor_lies_aligned_to_its_dtype(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write_safetensors(tmp_path / "one", stored(tensors), {})
    content = (tmp_path / "one").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, tensor in tensors.items():
        assert (8 + length + header[name]["data_offsets"][0]) % tensor.dtype.itemsize == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_what_is_not_finite_is_not_written(tmp_path: Path, dtype: torch.dtype, bad: float) -> None:
    tensors = {"good": torch.ones(3, dtype=dtype), "bad": torch.tensor([1, bad, 2], dtype=dtype)}
    with pytest.raises(QtoolError, match=r"^bad: holds NaN or infinite numbers; fetch"):
        write_safetensors(tmp_path / "one", stored(tensors), {})


def test_the_order_of_the_tensors_does_not_change_the_bytes(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    write_safetensors(tmp_path / "one", stored(tensors), {})
    write_safetensors(tmp_path / "two", stored(tensors)[::-1], {})
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_large_model_is_cut_into_shards_with_an_index(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write_weights(tmp_path, stored(tensors), shard_bytes=80)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    assert_same(dict(read(files)), tensors)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / file, framework="pt") as handle:
            assert name in handle.keys()  # noqa: SIM118 - no mapping


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_files_that_are_finished_become_shards_as_they_are(
    tmp_path: Path, tensors: dict[str, Tensor], links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:

        def refuse(*_: object) -> None:
            raise PermissionError("a file has one name here")

        monkeypatch.setattr(Path, "hardlink_to", refuse)
    file, folder, before = tmp_path / "finished", tmp_path / "model", stored(tensors)
    folder.mkdir()
    write_safetensors(file, before[3:], PYTORCH)
    write_weights(folder, before[:3], 80, {file: before[3:]})
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) == 3
    assert_same(dict(read(shards)), tensors)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert {name for name, shard in index["weight_map"].items() if folder / shard == shards[-1]} == set(
        list(tensors)[3:]
    )
    assert shards[-1].samefile(file) == links
    write_weights(tmp_path, before[:3], 10_000, {file: before[3:]})
    assert_same(dict(read([tmp_path / "model.safetensors"])), tensors)


def test_a_small_model_is_one_file_without_index(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write_weights(tmp_path, stored(tensors), shard_bytes=10_000)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
