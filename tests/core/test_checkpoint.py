import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.core.checkpoint import INDEX, Checkpoint
from qtool.errors import QtoolError, UsageError


def _shard(folder: Path) -> dict[str, torch.Tensor]:
    """Cut the single weights file of `folder` in two; returns what it held."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    shards = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for shard, members in shards.items():
        save_file({name: tensors[name] for name in members}, folder / shard)
    (folder / "model.safetensors").unlink()
    weight_map = {name: shard for shard, members in shards.items() for name in members}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def test_shards_read_as_one(tiny_copy: Path) -> None:
    tensors = _shard(tiny_copy)
    checkpoint = Checkpoint(tiny_copy)
    assert set(checkpoint) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
        assert checkpoint.shape(name) == tuple(tensor.shape)
    assert {path.name for path in checkpoint.files} >= {"one.safetensors", "two.safetensors", INDEX}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tensors_come_in_their_stored_dtype(tiny_copy: Path, dtype: torch.dtype) -> None:
    path = tiny_copy / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)
    checkpoint = Checkpoint(tiny_copy)
    linear = checkpoint.linear("model.layers.2.mlp.down_proj")
    assert isinstance(linear.weight, torch.Tensor)
    assert (linear.weight.dtype, linear.bias) == (dtype, None)
    assert linear.dense().dtype == torch.float32


@pytest.mark.parametrize("keep", [0, 4, 100, 10_000, -1])
def test_a_truncated_file_is_an_error_on_opening(tiny_copy: Path, keep: int) -> None:
    path = tiny_copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(QtoolError, match=r"model\.safetensors: is truncated"):
        Checkpoint(tiny_copy)


def test_a_missing_shard_is_an_error(tiny_copy: Path) -> None:
    _shard(tiny_copy)
    (tiny_copy / "two.safetensors").unlink()
    with pytest.raises(QtoolError, match=r"two\.safetensors: is missing"):
        Checkpoint(tiny_copy)


@pytest.mark.parametrize(
    ("weight_map", "said"),
    [
        (None, "lacks a weight_map"),
        ({}, "lacks a weight_map"),
        ({"a": "../model.safetensors"}, "wanted a file name"),
        ({"a": "one.safetensors"}, "lacks tensor a"),
    ],
)
def test_an_index_that_does_not_fit_is_an_error(
    tiny_copy: Path, weight_map: dict[str, str] | None, said: str
) -> None:
    _shard(tiny_copy)
    (tiny_copy / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(QtoolError, match=said):
        Checkpoint(tiny_copy)


def test_a_single_file_beside_an_index_of_others_is_refused(tiny_copy: Path) -> None:
    tensors = _shard(tiny_copy)
    save_file(tensors, tiny_copy / "model.safetensors")
    with pytest.raises(
        UsageError, match=r"holds both model\.safetensors and model\.safetensors\.index\.json"
    ):
        Checkpoint(tiny_copy)
    (tiny_copy / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    assert set(Checkpoint(tiny_copy)) == set(tensors)


def test_what_is_no_checkpoint_is_refused(tiny_copy: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a folder"):
        Checkpoint(tmp_path / "none")
    with pytest.raises(UsageError, match=r"has no config\.json"):
        Checkpoint(tmp_path)
    (tiny_copy / "model.safetensors").rename(tiny_copy / "model.gguf")
    with pytest.raises(UsageError, match=r"wanted safetensors weights; name the file .*model\.gguf instead"):
        Checkpoint(tiny_copy)


@pytest.mark.parametrize("text", ["{", "[]", "\xff", "[" * 100_000], ids=["cut", "list", "bytes", "deep"])
def test_a_config_that_is_no_json_object_is_an_error(tiny_copy: Path, text: str) -> None:
    (tiny_copy / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(QtoolError, match=r"config\.json: "):
        Checkpoint(tiny_copy)


def test_an_unknown_tensor_names_the_checkpoint(tiny: Path) -> None:
    with pytest.raises(QtoolError, match="holds no tensor nothing; is it a checkpoint of LlamaForCausalLM"):
        Checkpoint(tiny).tensor("nothing")


@pytest.mark.parametrize("config", [[1], "awq", 3])
def test_a_quantization_config_that_is_no_object_is_an_error(tiny_copy: Path, config: object) -> None:
    values = json.loads((tiny_copy / "config.json").read_text())
    (tiny_copy / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    with pytest.raises(QtoolError, match=r"quantization_config is .*, wanted an object"):
        Checkpoint(tiny_copy)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.bias"])
def test_a_dense_linear_holds_plain_numbers(tiny_copy: Path, name: str, dtype: torch.dtype) -> None:
    path = tiny_copy / "model.safetensors"
    save_file(load_file(path) | {name: torch.zeros(160, 96).to(dtype)}, path)
    with pytest.raises(QtoolError, match=f"{name} holds {dtype}, but quantization_config"):
        Checkpoint(tiny_copy).linear("model.layers.0.mlp.up_proj")
