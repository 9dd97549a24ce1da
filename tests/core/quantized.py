"""Checkpoints of any scheme in any format, their weights rounded to nearest."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.core.activation import Activation
from qtool.core.formats import find_writer
from qtool.core.formats.contract import Contents
from qtool.core.qtensor import KvScales, Linear, Quantized
from qtool.core.schemes import (
    NVFP4_ACTIVATIONS,
    ActivationScheme,
    Fp4Scheme,
    Fp8Scheme,
    IntScheme,
    KvCacheScheme,
    LinearScheme,
    WeightScheme,
)
from qtool.quantize.methods.floats import (
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
    shared_nvfp4_scale,
)
from qtool.quantize.methods.grid import fit_grid
from tests.compile.checkpoints import edit_config

NVFP4, MXFP4 = Fp4Scheme("nvfp4"), Fp4Scheme("mxfp4")
INT8_DYNAMIC, FP8_DYNAMIC = ActivationScheme("int8", True), ActivationScheme("fp8", True)
INT8_STATIC, FP8_STATIC = ActivationScheme("int8", False, symmetric=False), ActivationScheme("fp8", False)
FP8_BLOCK = LinearScheme(Fp8Scheme(64, 32), ActivationScheme("fp8", True, group_size=32))

SCHEMES = (
    *(LinearScheme(IntScheme(bits, 32, sym)) for bits in (3, 4, 8) for sym in (True, False)),
    *(LinearScheme(IntScheme(bits, None, sym)) for bits in (3, 4, 8) for sym in (True, False)),
    LinearScheme(IntScheme(8, None, True), INT8_DYNAMIC),
    LinearScheme(IntScheme(8, 32, False), INT8_STATIC),
    LinearScheme(IntScheme(4, 32, True), FP8_DYNAMIC),
    LinearScheme(Fp8Scheme(1, None)),
    LinearScheme(Fp8Scheme(1, None), FP8_DYNAMIC),
    LinearScheme(Fp8Scheme(None, None), FP8_STATIC),
    LinearScheme(Fp8Scheme(1, 32)),
    FP8_BLOCK,
    LinearScheme(NVFP4),
    LinearScheme(NVFP4, NVFP4_ACTIVATIONS),
    LinearScheme(MXFP4),
)  # fmt: skip
"""What compressed-tensors and qtool both know, on inputs of 96 and 160."""


def round_to(weight: Tensor, scheme: WeightScheme) -> Quantized:
    """A weight [N, K] rounded to nearest."""
    if isinstance(scheme, Fp8Scheme):
        return quantize_fp8(weight, scheme, weight.dtype)
    if isinstance(scheme, Fp4Scheme):
        return (
            quantize_mxfp4(weight)
            if scheme == MXFP4
            else quantize_nvfp4(weight, shared_nvfp4_scale([weight]))
        )
    return fit_grid(weight, scheme, weight.dtype).quantize(weight)


def linear_of(weight: Tensor, scheme: LinearScheme) -> Linear:
    """The linear of that scheme; what is calibrated elsewhere is made up, and too narrow for some inputs."""
    inputs = scheme.activation
    activation = None
    if inputs is not None:
        scale = None if inputs.dynamic and inputs.kind != "nvfp4" else 0.0371
        activation = Activation(inputs, scale, 0 if inputs.symmetric else -17)
    return Linear(round_to(weight, scheme.weight), None, activation=activation)


def write_scheme(
    source: Path,
    folder: Path,
    schemes: LinearScheme | Mapping[str, LinearScheme],
    format_name: str = "compressed-tensors",
    kv_cache: KvCacheScheme | None = None,
) -> dict[str, Linear]:
    """A copy of `source` in a format; what it holds, by module.

    `schemes`: one for all linears of the layers, or by a part of the names of those that have it.
    """
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    chosen: dict[str, LinearScheme] = {}
    dense = ["lm_head"]
    for module in [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]:
        by_part = {"": schemes} if isinstance(schemes, LinearScheme) else schemes
        scheme = next((scheme for part, scheme in by_part.items() if part in module), None)
        if scheme is None:
            dense.append(module)
        else:
            chosen[module] = scheme
    linears = {
        module: linear_of(tensors.pop(f"{module}.weight"), scheme) for module, scheme in chosen.items()
    }
    shapes = {module: linear.weight.shape for module, linear in linears.items()}
    writer = find_writer(format_name)(Contents(chosen, shapes, dense, kv_cache))
    for module, linear in linears.items():
        tensors |= writer.encode(module, linear)
    if kv_cache is not None:
        for layer in range(3):
            tensors |= writer.encode_kv(f"model.layers.{layer}.self_attn", kv_scales(layer))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config=writer.config())
    for name, content in writer.files().items():
        (folder / name).write_text(json.dumps(content))
    return linears


def kv_scales(layer: int) -> KvScales:
    """One KV head, so a scale a layer is a scale a head."""
    return KvScales(torch.tensor([0.02 + layer / 128]), torch.tensor([0.03]))


def assert_equal(found: Linear, wanted: Linear) -> None:
    """To the bit: codes, scales, zero points, and how inputs are rounded."""
    assert not isinstance(found.weight, Tensor)
    assert not isinstance(wanted.weight, Tensor)
    assert found.weight.scheme == wanted.weight.scheme
    for part in ("codes", "scale", "zero_point", "global_scale"):
        mine, theirs = getattr(found.weight, part, None), getattr(wanted.weight, part, None)
        assert (mine is None) == (theirs is None), part
        if mine is not None and theirs is not None:
            assert mine.dtype == theirs.dtype, part
            assert torch.equal(mine.float(), theirs.float()), part
    if wanted.activation is None or found.activation is None:
        assert found.activation is wanted.activation
        return
    assert found.activation.scheme == wanted.activation.scheme
    assert found.activation.zero_point == wanted.activation.zero_point
    if wanted.activation.scale is None or found.activation.scale is None:
        assert found.activation.scale is wanted.activation.scale
    else:  # formats hold it in float32, and some its reciprocal
        assert found.activation.scale == pytest.approx(wanted.activation.scale, rel=2**-23)
