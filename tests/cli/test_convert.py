"""Conversions keep every number, through the command."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.core.checkpoint import Checkpoint
from qtool.core.formats import WRITERS
from qtool.core.schemes import Fp8Scheme, IntScheme, KvCacheScheme, LinearScheme
from qtool.quantize.convert import convert_checkpoint
from tests.cli.conftest import Qtool
from tests.compile.peer_checkpoints import write_awq, write_gptq
from tests.core.quantized import (
    FP8_DYNAMIC,
    FP8_STATIC,
    INT8_DYNAMIC,
    NVFP4,
    NVFP4_ACTIVATIONS,
    assert_equal,
    kv_scales,
    write_scheme,
)


def numbers(folder: Path) -> dict[str, torch.Tensor]:
    """What every quantized linear of a checkpoint stands for."""
    checkpoint = Checkpoint(folder)
    return {module: checkpoint.linear(module).dense() for module in checkpoint.schemes()}


def assert_same_numbers(a: Path, b: Path) -> None:
    mine, theirs = numbers(a), numbers(b)
    assert mine.keys() == theirs.keys()
    for module, weight in mine.items():
        assert torch.equal(weight, theirs[module]), module


def test_awq_becomes_gptq_and_compressed_tensors_and_awq_again(
    tiny: Path, tmp_path: Path, qtool: Qtool
) -> None:
    awq, weights = write_awq(tiny, tmp_path / "awq")
    at = awq
    for format_name in ("gptq", "gptq_v2", "compressed-tensors", "awq"):
        output = tmp_path / format_name / "model"
        ended = qtool("convert", at, output, "--format", format_name)
        assert (ended.code, ended.out.strip()) == (0, str(output))
        for module, weight in weights.items():
            assert torch.equal(Checkpoint(output).linear(module).dense(), weight)
        at = output
    before, after = (load_file(folder / "model.safetensors") for folder in (awq, at))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("order", ["plain", "activation"])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_is_written_as_others_write_it(
    bits: int, order: str, version: str, tiny: Path, tmp_path: Path
) -> None:
    gptq, _ = write_gptq(tiny, tmp_path / "gptq", bits=bits, order=order, version=version)
    convert_checkpoint(gptq, tmp_path / "again", version)
    before, after = (load_file(folder / "model.safetensors") for folder in (gptq, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert config["desc_act"] is (order == "activation")
    assert json.loads((tmp_path / "again" / "quantize_config.json").read_text()) == config


def test_linears_of_other_groups_are_written_in_common_ones(tiny: Path, tmp_path: Path) -> None:
    schemes = {
        "down_proj": LinearScheme(IntScheme(4, 80, True)),
        "mlp": LinearScheme(IntScheme(4, 96, False)),
        "o_proj": LinearScheme(IntScheme(4, None, True)),
    }
    write_scheme(tiny, tmp_path / "mixed", schemes)
    for format_name in ("awq", "gptq"):
        convert_checkpoint(tmp_path / "mixed", tmp_path / format_name, format_name)
        assert_same_numbers(tmp_path / "mixed", tmp_path / format_name)
        config = Checkpoint(tmp_path / format_name).config["quantization_config"]
        assert config["group_size"] == 16
    assert set(Checkpoint(tmp_path / "awq").config["quantization_config"]["modules_to_not_convert"]) == {
        "lm_head", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
    }  # fmt: skip
    for format_name in ("awq", "gptq"):
        dynamic = Checkpoint(tmp_path / format_name).config["quantization_config"]["dynamic"]
        assert r"-:model\.layers\.\d+\.self_attn\.q_proj$" in dynamic


@pytest.mark.parametrize(
    "scheme",
    [
        LinearScheme(Fp8Scheme(None, None), FP8_STATIC),
        LinearScheme(Fp8Scheme(1, None), FP8_DYNAMIC),
        LinearScheme(NVFP4),
    ],
    ids=str,
)
def test_modelopt_and_compressed_tensors_turn_into_each_other(
    scheme: LinearScheme, tiny: Path, tmp_path: Path
) -> None:
    """nvfp4's global scale is a power of two here, so its reciprocal is exact."""
    kv_cache = KvCacheScheme("fp8")
    written = write_scheme(tiny, tmp_path / "a", scheme, "modelopt", kv_cache)
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "compressed-tensors")
    convert_checkpoint(tmp_path / "b", tmp_path / "c", "modelopt")
    for folder in (tmp_path / "b", tmp_path / "c"):
        checkpoint = Checkpoint(folder)
        for module, linear in written.items():
            assert_equal(checkpoint.linear(module), linear)
        assert checkpoint.kv_cache == kv_cache
        assert torch.equal(checkpoint.kv_scales("model.layers.2.self_attn").key, kv_scales(2).key)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "ac")
    assert before.keys() == after.keys()


def test_a_global_scale_that_is_no_power_of_two_moves_by_its_last_bit(tiny: Path, tmp_path: Path) -> None:
    write_scheme(tiny, tmp_path / "a", LinearScheme(NVFP4, NVFP4_ACTIVATIONS), "modelopt")
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    odd = {name: tensor * 1.2345 if "weight_scale_2" in name else tensor for name, tensor in tensors.items()}
    save_file(odd, tmp_path / "a" / "model.safetensors", metadata={"format": "pt"})
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "compressed-tensors")
    mine, theirs = numbers(tmp_path / "a"), numbers(tmp_path / "b")
    for module, weight in mine.items():
        # compressed-tensors stores the reciprocal in float32: half a bit, and another in the product
        assert torch.allclose(weight, theirs[module], rtol=2**-23, atol=0)


def test_shards_are_filled_one_after_another_and_hold_all(tiny: Path, tmp_path: Path) -> None:
    awq, _ = write_awq(tiny, tmp_path / "awq")
    convert_checkpoint(awq, tmp_path / "gptq", "gptq", shard_bytes=40_000)
    index = json.loads((tmp_path / "gptq" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "gptq").glob("*.safetensors"))
    assert len(shards) > 2
    assert [shard.name for shard in shards] == sorted(set(index["weight_map"].values()))
    sizes = []
    for shard in shards:
        tensors = load_file(shard)
        assert all(index["weight_map"][name] == shard.name for name in tensors)
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
    assert sum(sizes) == index["metadata"]["total_size"]
    assert_same_numbers(awq, tmp_path / "gptq")
    assert not list((tmp_path / "gptq").glob("*.writing"))


def test_what_lies_beside_the_weights_comes_along(tiny: Path, tmp_path: Path) -> None:
    awq, _ = write_awq(tiny, tmp_path / "awq")
    convert_checkpoint(awq, tmp_path / "ct", "compressed-tensors")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "ct" / name).read_bytes() == (awq / name).read_bytes()


@pytest.mark.parametrize(
    ("format_name", "message"),
    [
        ("awq", "down_proj: is quantized as int8 symmetric, channel; int8 per token activations; awq holds"),
        ("gtpq", "format 'gtpq' is not written; did you mean 'gptq'"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(
    format_name: str, message: str, tiny: Path, tmp_path: Path, qtool: Qtool
) -> None:
    write_scheme(tiny, tmp_path / "int8", LinearScheme(IntScheme(8, None, True), INT8_DYNAMIC))
    ended = qtool("convert", tmp_path / "int8", tmp_path / "out", "-f", format_name)
    assert (ended.code, ended.out) == (2, "")
    assert message in " ".join(ended.err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["int8"]


def test_inputs_in_an_order_of_their_own_stay_in_gptq(tiny: Path, tmp_path: Path, qtool: Qtool) -> None:
    gptq, _ = write_gptq(tiny, tmp_path / "gptq", order="activation")
    for format_name in ("awq", "compressed-tensors"):
        ended = qtool("convert", gptq, tmp_path / "out", "-f", format_name)
        assert ended.code == 2
        assert "has groups of inputs from anywhere (g_idx)" in " ".join(ended.err.split())
        assert [path.name for path in tmp_path.iterdir()] == ["gptq"]


def test_a_dense_checkpoint_has_nothing_to_convert(tiny: Path, tmp_path: Path, qtool: Qtool) -> None:
    ended = qtool("convert", tiny, tmp_path / "out", "-f", "awq")
    assert ended.code == 2
    assert "holds no quantized linears" in ended.err


def test_the_help_lists_every_format(qtool: Qtool) -> None:
    said = " ".join(qtool("convert", "--help").out.replace("│", " ").split())
    assert f"One of: {', '.join(WRITERS)}." in said


def test_zero_points_that_tools_read_differently_are_refused(
    tiny: Path, tmp_path: Path, qtool: Qtool
) -> None:
    """A group of positive weights alone has the least code as zero point, which version 1 stores as -1."""
    positive = Path(shutil.copytree(tiny, tmp_path / "positive"))
    tensors = load_file(positive / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3] = 0.5
    save_file(tensors, positive / "model.safetensors", metadata={"format": "pt"})
    write_scheme(positive, tmp_path / "a", LinearScheme(IntScheme(4, 32, False)))
    ended = qtool("convert", tmp_path / "a", tmp_path / "v1", "-f", "gptq")
    assert ended.code == 2
    assert "up_proj: has zero points of 0, which gptq stores as -1" in " ".join(ended.err.split())
    assert qtool("convert", tmp_path / "a", tmp_path / "v2", "-f", "gptq_v2").code == 0
    assert_same_numbers(tmp_path / "a", tmp_path / "v2")
