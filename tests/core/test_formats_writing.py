"""What a format writes it reads again to the bit, and what it cannot hold it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from qtool.core.checkpoint import Checkpoint
from qtool.core.formats import WRITERS, find_writer
from qtool.core.formats.contract import Contents
from qtool.core.qtensor import Fp4Tensor, Fp8Tensor, Linear
from qtool.core.schemes import (
    NVFP4_ACTIVATIONS,
    Fp8Scheme,
    IntScheme,
    KvCacheScheme,
    LinearScheme,
)
from qtool.errors import QtoolError, UsageError
from tests.core.quantized import (
    FP8_BLOCK,
    FP8_DYNAMIC,
    FP8_STATIC,
    MXFP4,
    NVFP4,
    SCHEMES,
    assert_equal,
    kv_scales,
    write_scheme,
)
from tests.core.test_formats import damage

SQUARE_BLOCKS = LinearScheme(Fp8Scheme(32, 32), FP8_BLOCK.activation)
"""Blocks that divide every linear, as transformers wants where it unpacks them."""

FORMATS = {
    "compressed-tensors": SCHEMES,
    "awq": [LinearScheme(IntScheme(4, size, False)) for size in (32, None)],
    "gptq": [
        LinearScheme(IntScheme(bits, size, sym))
        for bits in (2, 3, 4, 8)
        for size in (32, None)
        for sym in (True, False)
    ],
    "modelopt": [
        LinearScheme(Fp8Scheme(None, None), FP8_STATIC),
        LinearScheme(Fp8Scheme(1, None), FP8_DYNAMIC),
        LinearScheme(NVFP4),
        LinearScheme(NVFP4, NVFP4_ACTIVATIONS),
    ],
    "fp8": [FP8_BLOCK],
}
FORMATS["gptq_v2"] = FORMATS["gptq"]


def test_every_format_is_tried_here() -> None:
    assert set(FORMATS) == set(WRITERS)


@pytest.mark.parametrize(
    ("format_name", "scheme"),
    [(name, scheme) for name, schemes in FORMATS.items() for scheme in schemes],
    ids=str,
)
def test_what_is_written_is_read_again_to_the_bit(
    format_name: str, scheme: LinearScheme, tiny: Path, tmp_path: Path
) -> None:
    written = write_scheme(tiny, tmp_path / "model", scheme, format_name)
    checkpoint = Checkpoint(tmp_path / "model")
    assert checkpoint.schemes() == dict.fromkeys(written, scheme)
    for module, linear in written.items():
        assert checkpoint.format is not None
        assert checkpoint.format.shape(module) == linear.weight.shape
        assert_equal(checkpoint.linear(module), linear)
    assert checkpoint.kv_cache is None


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_compressed_tensors_packs_the_same_bytes(scheme: LinearScheme, tiny: Path, tmp_path: Path) -> None:
    """Its own compressor, told our scales, makes of our weights the tensors that we write."""
    written = write_scheme(tiny, tmp_path / "model", scheme)
    config = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    theirs = QuantizationConfig.model_validate(config)
    peer = QuantizationScheme.model_validate(theirs.config_groups["group_0"])
    assert str(peer.format) == infer_module_format(torch.nn.Linear, peer).value
    compressor = BaseCompressor.get_value_from_registry(str(peer.format))
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    weights = load_file(tiny / "model.safetensors")
    for module, linear in list(written.items())[:4]:
        stored = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items() if f"{module}." in name}
        made = compressor.compress(_state(weights[f"{module}.weight"], linear, stored), peer)
        inputs = {name: tensor for name, tensor in stored.items() if name.startswith("input_")}
        assert stored.keys() == made.keys() | inputs.keys()
        for name, tensor in made.items():
            assert tensor.dtype == stored[name].dtype, name
            assert torch.equal(_bytes(tensor), _bytes(stored[name])), name


def _state(numbers: Tensor, linear: Linear, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """A linear as compressed-tensors holds it before it compresses: the weight, and scales as numbers."""
    weight = linear.weight
    assert not isinstance(weight, Tensor)
    state = {"weight": numbers, "weight_scale": stored["weight_scale"]}
    if isinstance(weight, Fp4Tensor):
        state["weight_scale"] = weight.scale.float()
        if "weight_global_scale" in stored:
            state["weight_global_scale"] = stored["weight_global_scale"]
    elif not isinstance(weight, Fp8Tensor) and weight.zero_point is not None:
        state["weight_zero_point"] = weight.zero_point
    return state


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("format_name", "scheme"),
    [*(("compressed-tensors", scheme) for scheme in SCHEMES), ("fp8", SQUARE_BLOCKS)],
    ids=str,
)
def test_transformers_loads_the_same_numbers(
    format_name: str, scheme: LinearScheme, tiny: Path, tmp_path: Path
) -> None:
    written = write_scheme(tiny, tmp_path / "model", scheme, format_name)
    # compressed-tensors unpacks fp4 into bfloat16, while its inputs are those of the model
    dtype = torch.bfloat16 if scheme.activation == NVFP4_ACTIVATIONS else torch.float32
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
    with torch.no_grad():
        model(torch.arange(7)[None])  # some are unpacked in the first forward pass
    for module, linear in written.items():
        assert torch.equal(model.get_submodule(module).weight, linear.dense(dtype)), module


def test_schemes_of_several_kinds_lie_in_one_checkpoint(tiny: Path, tmp_path: Path) -> None:
    schemes = {
        "up_proj": LinearScheme(NVFP4),
        "down_proj": LinearScheme(MXFP4),
        "q_proj": LinearScheme(Fp8Scheme(1, None), FP8_DYNAMIC),
        "layers.1": LinearScheme(IntScheme(3, 32, False)),
    }
    written = write_scheme(tiny, tmp_path / "model", schemes)
    checkpoint = Checkpoint(tmp_path / "model")
    assert checkpoint.config["quantization_config"]["format"] == "mixed-precision"
    assert len(checkpoint.schemes()) == len(written) == 3 * 3 + 4
    for module, linear in written.items():
        assert_equal(checkpoint.linear(module), linear)


def test_modelopt_names_what_each_linear_is_where_they_differ(tiny: Path, tmp_path: Path) -> None:
    schemes = {
        "mlp": LinearScheme(NVFP4, NVFP4_ACTIVATIONS),
        "o_proj": LinearScheme(Fp8Scheme(None, None), FP8_STATIC),
    }
    written = write_scheme(tiny, tmp_path / "model", schemes, "modelopt")
    checkpoint = Checkpoint(tmp_path / "model")
    said = json.loads((tmp_path / "model" / "hf_quant_config.json").read_text())["quantization"]
    assert said["quant_algo"] == "MIXED_PRECISION"
    assert set(said["exclude_modules"]) == {"lm_head", *(f"model.layers.*.self_attn.{x}_proj" for x in "qkv")}
    for module, linear in written.items():
        assert_equal(checkpoint.linear(module), linear)


@pytest.mark.parametrize("left", ["config.json", "hf_quant_config.json"])
def test_modelopt_is_known_by_either_file(left: str, tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    written = write_scheme(tiny, folder, LinearScheme(NVFP4, NVFP4_ACTIVATIONS), "modelopt")
    if left == "config.json":
        (folder / "hf_quant_config.json").unlink()
    else:
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
    module, linear = next(iter(written.items()))
    assert_equal(Checkpoint(folder).linear(module), linear)


@pytest.mark.parametrize("format_name", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("kv_cache", [KvCacheScheme("fp8"), KvCacheScheme("int8", per_head=True)], ids=str)
def test_scales_of_a_kv_cache_are_read_again(
    format_name: str, kv_cache: KvCacheScheme, tiny: Path, tmp_path: Path
) -> None:
    scheme = LinearScheme(Fp8Scheme(1, None), FP8_DYNAMIC)
    if format_name == "modelopt" and kv_cache.per_head:
        with pytest.raises(UsageError, match="modelopt holds an fp8 KV cache with a scale a"):
            write_scheme(tiny, tmp_path / "model", scheme, format_name, kv_cache)
        return
    write_scheme(tiny, tmp_path / "model", scheme, format_name, kv_cache)
    checkpoint = Checkpoint(tmp_path / "model")
    assert checkpoint.kv_cache == kv_cache
    for layer in range(3):
        found = checkpoint.kv_scales(f"model.layers.{layer}.self_attn")
        assert torch.equal(found.key, kv_scales(layer).key)
        assert torch.equal(found.value, kv_scales(layer).value)


def test_a_kv_cache_alone_is_a_scheme(tiny: Path, tmp_path: Path) -> None:
    write_scheme(tiny, tmp_path / "model", {}, kv_cache=KvCacheScheme("int8"))
    checkpoint = Checkpoint(tmp_path / "model")
    assert (checkpoint.schemes(), checkpoint.kv_cache) == ({}, KvCacheScheme("int8"))
    assert not isinstance(checkpoint.linear("model.layers.0.mlp.up_proj").weight, Fp8Tensor)


INT4, SHAPES = LinearScheme(IntScheme(4, 32, False)), {"a": (96, 160), "b": (96, 96)}


@pytest.mark.parametrize(
    ("format_name", "schemes", "shapes", "message"),
    [
        ("awq", {"a": LinearScheme(IntScheme(8, 32, True))}, SHAPES, "a: is quantized as int8"),
        ("awq", {"a": LinearScheme(NVFP4)}, SHAPES, "a: is quantized as nvfp4"),
        ("awq", {"a": INT4}, {"a": (12, 160)}, "a: has 12 outputs; awq packs 8"),
        ("gptq", {"a": INT4}, {"a": (96, 100)}, r"a: has the shape \(96, 100\); gptq packs"),
        ("gptq", {"a": INT4, "b": LinearScheme(IntScheme(8, 32, True))}, SHAPES, "b: has 8 bits"),
        ("gptq", {"a": LinearScheme(IntScheme(4, 32, True), FP8_DYNAMIC)}, SHAPES, "a: has fp8 per token"),
        ("modelopt", {"a": LinearScheme(NVFP4), "b": INT4}, SHAPES, "b: is quantized as int4 asymmetric"),
        ("modelopt", {"a": LinearScheme(Fp8Scheme(None, None))}, SHAPES, "a: is quantized as fp8, tensor"),
        ("fp8", {"a": LinearScheme(Fp8Scheme(1, None))}, SHAPES, "a: is quantized as fp8, channel; fp8"),
        ("fp8", {"a": LinearScheme(Fp8Scheme(64, 32))}, SHAPES, "a: has inputs as they are; engines"),
        (
            "fp8",
            {"a": FP8_BLOCK, "b": replace(FP8_BLOCK, weight=Fp8Scheme(32, 32))},
            SHAPES,
            "b: is quantized as fp8, block 32x32, others as fp8, block 64x32",
        ),
    ],
)  # fmt: skip
def test_what_a_format_cannot_hold_is_refused(
    format_name: str,
    schemes: dict[str, LinearScheme],
    shapes: dict[str, tuple[int, int]],
    message: str,
) -> None:
    with pytest.raises(UsageError, match=message):
        find_writer(format_name)(Contents(schemes, shapes, []))


@pytest.mark.parametrize("format_name", ["awq", "gptq", "fp8"])
def test_a_kv_cache_is_refused_where_a_format_knows_none(format_name: str) -> None:
    schemes = {"a": FP8_BLOCK if format_name == "fp8" else INT4}
    with pytest.raises(UsageError, match=f"{format_name} knows no quantized KV cache"):
        find_writer(format_name)(Contents(schemes, SHAPES, [], KvCacheScheme("fp8")))


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="format 'gtpq' is not written; did you mean 'gptq'"):
        find_writer("gtpq")


MODULE = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("format_name", "scheme", "change", "message"),
    [
        ("compressed-tensors", NVFP4, lambda p: p.pop("weight_global_scale"), "weight_global_scale is mis"),
        ("compressed-tensors", NVFP4, lambda p: p["weight_global_scale"].zero_(), "weight_global_scale has"),
        ("compressed-tensors", NVFP4, lambda p: p["input_global_scale"].zero_(), "input_global_scale has z"),
        ("compressed-tensors", NVFP4, lambda p: p["weight_scale"].view(torch.uint8).zero_(), "weight_scale"),
        (
            "compressed-tensors", NVFP4, lambda p: p["weight_scale"].view(torch.uint8)[2, 3].fill_(0x7F),
            "weight_scale is all zero or has values that are no numbers",
        ),
        (
            "compressed-tensors", NVFP4, lambda p: p.update(weight_packed=p["weight_packed"][:, 4:]),
            "weight_packed has 152 inputs, which blocks of 16 do not divide",
        ),
        (
            "compressed-tensors", NVFP4, lambda p: p.update(weight_packed=p["weight_packed"].int()),
            "weight_packed holds int32, wanted uint8",
        ),
        ("compressed-tensors", MXFP4, lambda p: p["weight_scale"][2, 3].fill_(255), "weight_scale has"),
        ("compressed-tensors", MXFP4, lambda p: p.pop("weight_scale"), "weight_scale is missing"),
        (
            "compressed-tensors", MXFP4, lambda p: p.update(weight_scale=p["weight_scale"][1:]),
            r"weight_scale has shape \(95, 5\), wanted \(96, 5\)",
        ),
        ("modelopt", NVFP4, lambda p: p.pop("weight_scale_2"), "weight_scale_2 is missing"),
        ("modelopt", NVFP4, lambda p: p["weight_scale_2"].fill_(torch.inf), "weight_scale_2 has zero"),
        ("modelopt", NVFP4, lambda p: p.pop("input_scale"), "input_scale is missing"),
        ("modelopt", NVFP4, lambda p: p.pop("weight"), "weight is missing"),
        ("fp8", FP8_BLOCK.weight, lambda p: p["weight_scale_inv"][0, 1].zero_(), "weight_scale_inv has z"),
        (
            "fp8", FP8_BLOCK.weight, lambda p: p.update(weight_scale_inv=p["weight_scale_inv"][:1]),
            r"weight_scale_inv has shape \(1, 5\), wanted \(2, 5\)",
        ),
    ],
)  # fmt: skip
def test_damaged_floats_are_named(
    format_name: str, scheme: Any, change: Any, message: str, tiny: Path, tmp_path: Path
) -> None:
    inputs = {NVFP4: NVFP4_ACTIVATIONS, FP8_BLOCK.weight: FP8_BLOCK.activation}.get(scheme)
    write_scheme(tiny, tmp_path / "model", LinearScheme(scheme, inputs), format_name)
    damage(tmp_path / "model", change)
    with pytest.raises(QtoolError, match=rf"{MODULE}\.{message}"):
        Checkpoint(tmp_path / "model").linear(MODULE)


@pytest.mark.parametrize(
    ("format_name", "changes", "message"),
    [
        (
            "modelopt",
            {"quant_algo": "W4A8_AWQ"},
            "quant_algo 'W4A8_AWQ' is not supported; wanted FP8, FP8_PER",
        ),
        (
            "modelopt",
            {"kv_cache_scheme": {"type": "int"}},
            "kv_cache_quant_algo .* is not supported; wanted FP8",
        ),
        ("fp8", {"weight_block_size": None}, "weight_block_size is None, wanted two numbers"),
        ("fp8", {"activation_scheme": "static"}, "activation_scheme is 'static'.*wanted dynamic"),
        (
            "fp8",
            {"weight_block_size": [64, 36]},
            "down_proj.weight has 160 inputs, which groups of 36 do not",
        ),
    ],
)
def test_configs_that_are_not_known_are_refused(
    format_name: str, changes: dict[str, object], message: str, tiny: Path, tmp_path: Path
) -> None:
    scheme = FP8_BLOCK if format_name == "fp8" else LinearScheme(NVFP4)
    write_scheme(tiny, tmp_path / "model", scheme, format_name)
    (tmp_path / "model" / "hf_quant_config.json").unlink(missing_ok=True)
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))
    with pytest.raises(QtoolError, match=message):
        Checkpoint(tmp_path / "model").linear(MODULE)
