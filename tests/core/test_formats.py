"""Damaged checkpoints of every format are errors that name the module and what is wrong with it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.core.checkpoint import Checkpoint
from qtool.core.schemes import Fp4Scheme, Fp8Scheme, IntScheme, LinearScheme
from qtool.errors import QtoolError
from tests.compile.checkpoints import edit_config
from tests.compile.peer_checkpoints import write_awq, write_compressed, write_gptq
from tests.core.quantized import FP8_BLOCK, write_scheme

MODULE = "model.layers.1.mlp.down_proj"
"""160 inputs in groups of 32, 96 outputs."""
Parts = dict[str, Tensor]


def damage(folder: Path, change: Callable[[Parts], object]) -> None:
    """Change the stored parts of one linear."""
    tensors = load_file(folder / "model.safetensors")
    parts = {name.removeprefix(f"{MODULE}."): tensors.pop(name) for name in list(tensors) if MODULE in name}
    change(parts)
    tensors |= {f"{MODULE}.{name}": tensor.contiguous() for name, tensor in parts.items()}
    save_file(tensors, folder / "model.safetensors")


def assert_named(folder: Path, message: str) -> None:
    with pytest.raises(QtoolError, match=rf"{MODULE}\.{message}"):
        Checkpoint(folder).linear(MODULE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("scales"), "scales is missing"),
        (lambda p: p.pop("qzeros"), "qzeros is missing"),
        (lambda p: p.pop("qweight"), "qweight is missing"),
        (lambda p: p.update(scales=p["scales"][1:]), r"scales has shape \(4, 96\), wanted \(5, 96\)"),
        (lambda p: p.update(qzeros=p["qzeros"][:, 1:]), r"qzeros has shape \(5, 11\), wanted \(5, 12\)"),
        (lambda p: p["scales"][2, 3].zero_(), "scales has zero or non-finite"),
        (lambda p: p["scales"][2, 3].fill_(torch.inf), "scales has zero or non-finite"),
        (lambda p: p.update(scales=p["scales"].int()), "scales holds int32, wanted floating point"),
        (lambda p: p.update(qweight=p["qweight"].long()), "qweight holds int64, wanted int32"),
        (lambda p: p.update(qweight=p["qweight"].view(-1)), "qweight has shape .*wanted a matrix"),
    ],
)
@pytest.mark.parametrize("write", [write_awq, write_gptq])
def test_damaged_integers_are_named(
    write: Callable[[Path, Path], tuple[Path, Parts]],
    change: Callable[[Parts], object],
    message: str,
    tiny: Path,
    tmp_path: Path,
) -> None:
    folder, _ = write(tiny, tmp_path / "model")
    damage(folder, change)
    assert_named(folder, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["g_idx"][7].fill_(5), "g_idx names group 0 to 5, wanted 0 to 4"),
        (lambda p: p["g_idx"][7].fill_(-1), "g_idx names group -1 to 4"),
        (lambda p: p["g_idx"].zero_(), "g_idx gives groups other numbers of inputs than 32"),
        (lambda p: p.update(g_idx=p["g_idx"][1:]), r"g_idx has shape \(159,\), wanted \(160,\)"),
        (
            lambda p: p["qzeros"].add_(1),
            "qzeros has other zero points than sym: true means.*checkpoint_format",
        ),
    ],
)
def test_damaged_groups_are_named(
    change: Callable[[Parts], object], message: str, tiny: Path, tmp_path: Path
) -> None:
    folder, _ = write_gptq(tiny, tmp_path / "model", order="activation", symmetric=True)
    damage(folder, change)
    assert_named(folder, message)


def test_zero_points_read_by_the_wrong_version_are_noticed(tiny: Path, tmp_path: Path) -> None:
    folder, _ = write_gptq(tiny, tmp_path / "model", symmetric=True, version="gptq_v2")
    edit_quantization(folder, checkpoint_format="gptq")
    assert_named(folder, "qzeros has other zero points than sym: true means")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("fp8 static", lambda p: p.pop("weight_scale"), "weight_scale is missing"),
        ("fp8 static", lambda p: p.pop("input_scale"), "input_scale is missing"),
        ("fp8 static", lambda p: p["input_scale"].zero_(), "input_scale has zero or non-finite"),
        ("int8 static asymmetric", lambda p: p.pop("input_zero_point"), "input_zero_point is missing"),
        ("fp8", lambda p: p.update(weight=p["weight"].float()), "weight holds float32, wanted float8_e4m3fn"),
        (
            "fp8",
            lambda p: p["weight"].view(torch.uint8)[3, 4].fill_(0x7F),
            "weight has codes that are no numb",
        ),
        (
            "fp8 blocks",
            lambda p: p.update(weight_scale=p["weight_scale"][1:]),
            r"weight_scale has shape \(1, 5\)",
        ),
        ("int8", lambda p: p["weight_scale"][0].fill_(torch.nan), "weight_scale has zero or non-finite"),
        (
            "int8",
            lambda p: p.update(weight=p["weight"][1:]),
            r"weight_scale has shape \(96, 1\), wanted \(95, 1\)",
        ),
        ("int8 asymmetric groups", lambda p: p.pop("weight_zero_point"), "weight_zero_point is missing"),
        (
            "int4 int8 dynamic",
            lambda p: p.update(weight_packed=p["weight_packed"][:, 1:]),
            r"weight_packed has shape \(96, 19\), wanted \(96, 20\)",
        ),
    ],
)
def test_damaged_compressed_tensors_are_named(
    name: str, change: Callable[[Parts], object], message: str, tiny: Path, tmp_path: Path
) -> None:
    folder = write_compressed(tiny, tmp_path / "model", name)
    damage(folder, change)
    assert_named(folder, message)


def edit_quantization(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit_config(folder, quantization_config={**config, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'.*wanted gptq, gptq_v2"),
        ({"bits": 5}, "bits is 5, wanted 2, 3, 4 or 8"),
        ({"group_size": 0}, "group_size is 0"),
        ({"dynamic": {r".*\.down_proj": {"bits": 8}}}, "dynamic gives modules formats of their own"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv'.*wanted 'gemm'"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8"),
        ({"quant_method": "aqlm"}, "quant_method 'aqlm' is not supported"),
        ({"rotation": "hadamard"}, "quantization_config.rotation: unknown key .value 'hadamard'"),
        ({"modules_to_not_convert": ["up_proj"]}, "names 'up_proj', but model.layers.0.mlp.up_proj is"),
        ({"format": "marlin"}, "format is 'marlin', but checkpoint_format 'gptq'"),
        ({"dynamic": {r"-:.*\.up_proj$": {}}}, "dynamic exempts model.layers.0.mlp.up_proj by"),
    ],
)
def test_formats_that_are_not_known_are_refused(
    changes: dict[str, object], message: str, tiny: Path, tmp_path: Path
) -> None:
    folder, _ = write_gptq(tiny, tmp_path / "model")
    edit_quantization(folder, **changes)
    with pytest.raises(QtoolError, match=message):
        Checkpoint(folder)


def test_keys_that_tell_of_the_making_or_are_switched_off_are_passed_over(tiny: Path, tmp_path: Path) -> None:
    folder, _ = write_gptq(tiny, tmp_path / "model")
    edit_quantization(folder, damp_percent=0.01, meta={"quantizer": "gptqmodel:5"}, rotation=None, foem=False)
    Checkpoint(folder).linear(MODULE)


def test_a_head_that_is_said_to_be_quantized_is(tiny: Path, tmp_path: Path) -> None:
    folder, _ = write_gptq(tiny, tmp_path / "model")
    edit_quantization(folder, lm_head=True)
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"lm_head.weight": torch.zeros(320, 96)}, path)
    with pytest.raises(QtoolError, match="lm_head is true, but lm_head is stored as it was"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 0.5}, "quantization_config.alpha: unknown key"),
        ({"format": "gemv"}, "format is 'gemv'"),
        ({"modules_to_not_convert": ["up_proj"]}, "names 'up_proj', but model.layers.0.mlp.up_proj is quan"),
    ],
)
def test_what_awq_says_is_held_to_what_is_stored(
    changes: dict[str, object], message: str, tiny: Path, tmp_path: Path
) -> None:
    folder, _ = write_awq(tiny, tmp_path / "model")
    edit_quantization(folder, **changes)
    with pytest.raises(QtoolError, match=message):
        Checkpoint(folder)


NVFP4 = LinearScheme(Fp4Scheme("nvfp4"))


@pytest.mark.parametrize(
    ("changes", "beside", "message"),
    [
        ({"rotate": True}, {}, "quantization.rotate: unknown key"),
        ({}, {"rotate": True}, "quantization_config.rotate: unknown key"),
        ({"exclude_modules": ["lm_head", "*mlp*"]}, {}, r"names '\*mlp\*', but model.layers.0.mlp.down_proj"),
        ({}, {"exclude_modules": ["*mlp*"]}, r"names '\*mlp\*', but model.layers.0.mlp.down_proj"),
        ({}, {"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo is None, but 'FP8' in quantization_config"),
        ({}, {"ignore": ["model.layers.*"]}, r"names 'model.layers.\*', but model.layers.0"),
        ({"group_size": 32}, {"group_size": 32}, "group_size is 32, wanted 16 for nvfp4"),
        ({"quant_algo": "NVFP4"}, {}, "quant_algo is 'NVFP4', but 'W4A16_NVFP4' in quantization_config"),
        ({"kv_cache_quant_algo": "FP8"}, {}, "kv_cache_quant_algo is 'FP8', but kv_cache_scheme is None"),
    ],
)
def test_what_modelopt_says_twice_is_the_same_and_held_to_what_is_stored(
    changes: dict[str, object], beside: dict[str, object], message: str, tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write_scheme(tiny, folder, NVFP4, "modelopt")
    edit_quantization(folder, **beside)
    file = folder / "hf_quant_config.json"
    said = json.loads(file.read_text())
    file.write_text(json.dumps({**said, "quantization": {**said["quantization"], **changes}}))
    with pytest.raises(QtoolError, match=message):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("scheme", "layout", "part"),
    [
        (LinearScheme(IntScheme(4, 32, True)), "compressed-tensors", "weight_zero_point"),
        (LinearScheme(IntScheme(4, 32, True)), "compressed-tensors", "weight_g_idx"),
        (LinearScheme(IntScheme(4, 32, False)), "compressed-tensors", "input_scale"),
        (LinearScheme(Fp8Scheme(1, None)), "compressed-tensors", "weight_global_scale"),
        (LinearScheme(IntScheme(4, 32, False)), "gptq", "pre_quant_scale"),
        (LinearScheme(IntScheme(4, 32, False)), "awq", "weight"),
        (NVFP4, "modelopt", "pre_quant_scale"),
        (NVFP4, "modelopt", "input_scale"),
        (FP8_BLOCK, "fp8", "input_scale"),
    ],
)
def test_a_stored_part_that_would_not_be_read_is_named(
    scheme: LinearScheme, layout: str, part: str, tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write_scheme(tiny, folder, scheme, layout)
    Checkpoint(folder).linear(MODULE)
    damage(folder, lambda parts: parts.update({part: torch.ones(160)}))
    with pytest.raises(QtoolError, match=rf"{MODULE}\.{part} is stored, but as .* the linear is "):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotate": True}, "quantization_config.rotate: unknown key"),
        ({"channels": 2}, "group_0.channels: unknown key"),
        ({"weights": {"num_bits": 8, "type": "float", "scale_bias": 1}}, "weights.scale_bias: unknown key"),
        (
            {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "block_structure": [2, 2]}},
            "gives a size that strategy 'channel' has no use for",
        ),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme .* is not supported"),
        ({"transform_config": {"config_groups": {"a": {}}}}, "transform_config is not supported"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is not supported"),
        (
            {"weights": {"num_bits": 4, "type": "float"}},
            "weights {'num_bits': 4, 'type': 'float'} are not supp",
        ),
        ({"output_activations": {"num_bits": 8}}, "quantized output_activations"),
        (
            {"input_activations": {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": True}},
            "a dynamic scale for all tokens would depend on what else runs",
        ),
        ({"format": "marlin-24"}, "format 'marlin-24' is not supported"),
        ({"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' does not hold fp8, channel"),
        ({"format": "pack-quantized"}, "does not hold fp8, channel"),
    ],
)
def test_schemes_that_are_not_known_are_refused(
    changes: dict[str, object], message: str, tiny: Path, tmp_path: Path
) -> None:
    folder = write_compressed(tiny, tmp_path / "model", "fp8")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    (group if changes.keys() <= {*group, "channels"} else config).update(changes)
    edit_config(folder, quantization_config=config)
    with pytest.raises(QtoolError, match=message):
        Checkpoint(folder)


def test_codes_without_a_scheme_are_not_taken_for_numbers(tiny: Path, tmp_path: Path) -> None:
    folder = write_compressed(tiny, tmp_path / "model", "int8")
    edit_quantization(folder, ignore=["re:.*down_proj"])
    assert_named(folder, "weight holds torch.int8, but quantization_config")


def test_a_name_goes_before_a_pattern_and_a_pattern_before_every_linear(tiny: Path, tmp_path: Path) -> None:
    folder = write_compressed(tiny, tmp_path / "model", "int8")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    every = {**config["config_groups"]["group_0"], "targets": ["Linear"]}
    asymmetric = {**every["weights"], "symmetric": False}
    config["config_groups"] = {
        "a": {**every, "weights": {**asymmetric, "num_bits": 7}},
        "b": {**every, "targets": ["re:.*down_proj"], "weights": {**asymmetric, "num_bits": 6}},
        "c": {**every, "targets": [MODULE], "weights": {**asymmetric, "num_bits": 5}},
    }
    edit_config(folder, quantization_config=config)
    schemes = Checkpoint(folder).schemes()
    bits = [
        schemes[f"model.layers.{layer}"].weight.num_bits
        for layer in ("1.mlp.up_proj", "0.mlp.down_proj", "1.mlp.down_proj")
    ]
    assert bits == [7, 6, 5]
