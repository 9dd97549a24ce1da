"""Quantized checkpoints as other tools write them: compressed-tensors by its own compressors, the others from
their documented layouts."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.compile.checkpoints import edit_config

TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
COMPRESSED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "int8": ("naive-quantized", {"num_bits": 8, "strategy": "channel"}, None),
    "int8 asymmetric groups": (
        "naive-quantized",
        {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False},
        None,
    ),
    "int8 dynamic": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, TOKEN),
    "int8 dynamic asymmetric": (
        "int-quantized", {"num_bits": 8, "strategy": "channel"}, {**TOKEN, "symmetric": False}
    ),
    "int8 static": ("int-quantized", {"num_bits": 8, "strategy": "tensor"}, STATIC),
    "int8 static asymmetric": (
        "int-quantized", {"num_bits": 8, "strategy": "channel"}, {**STATIC, "symmetric": False}
    ),
    "int4 int8 dynamic": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, TOKEN),
    "fp8": ("naive-quantized", {**FP8, "strategy": "channel"}, None),
    "fp8 dynamic": ("float-quantized", {**FP8, "strategy": "channel"}, {**TOKEN, **FP8}),
    "fp8 static": ("float-quantized", {**FP8, "strategy": "tensor"}, {**STATIC, **FP8}),
    "fp8 blocks": (
        "float-quantized",
        {**FP8, "strategy": "block", "block_structure": [64, 32]},
        {**FP8, "strategy": "group", "group_size": 32, "dynamic": True},
    ),
}  # fmt: skip
"""By name: format, weights and input activations of compressed-tensors. Blocks of 64 divide few outputs."""


def write_compressed(source: Path, folder: Path, name: str, targets: str = "re:.*_proj$") -> Path:
    """A copy of a checkpoint, its linears compressed; static ranges are made up, and too narrow for some."""
    layout, weight_args, input_args = COMPRESSED[name]
    scheme = QuantizationScheme(
        targets=[targets],
        weights=QuantizationArgs(**weight_args),
        input_activations=None if input_args is None else QuantizationArgs(**input_args),
        format=layout,
    )
    compressor = BaseCompressor.get_value_from_registry(layout)

    def compress(module: str, weight: Tensor) -> dict[str, Tensor]:
        scale, zero_point = calculate_qparams(*_range(weight, scheme.weights), scheme.weights)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point}
        stored = compressor.compress(state, scheme)
        if scheme.input_activations is not None and not scheme.input_activations.dynamic:
            low, high = torch.tensor([-2.5]), torch.tensor([3 + crc32(module.encode()) % 8 / 4])
            scale, zero_point = calculate_qparams(low, high, scheme.input_activations)
            stored["input_scale"] = scale
            if not scheme.input_activations.symmetric:
                stored["input_zero_point"] = zero_point
        return stored

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=layout, quantization_status="compressed", ignore=["lm_head"]
    )
    return _rewrite(source, folder, compress, json.loads(config.model_dump_json()))


def _range(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """The least and the largest of each tensor, channel, group or block, in the shape of the scales."""
    rows, columns = weight.shape
    height, width = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, args.group_size),
        "block": args.block_structure,
    }[args.strategy]
    padding = (0, -columns % width, 0, -rows % height)
    blocks = torch.nn.functional.pad(weight, padding).unflatten(1, (-1, width)).unflatten(0, (-1, height))
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    return (low.reshape(1), high.reshape(1)) if args.strategy == "tensor" else (low, high)


def _rewrite(
    source: Path,
    folder: Path,
    compress: Callable[[str, Tensor], dict[str, Tensor]],
    config: dict[str, Any],
) -> Path:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        stored = compress(module, tensors.pop(name))
        tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return edit_config(folder, quantization_config=config)


def write_awq(source: Path, folder: Path, group_size: int = 32) -> tuple[Path, dict[str, Tensor]]:
    """A copy of a checkpoint in AutoAWQ's GEMM layout, and what its weights stand for, in float."""
    weights: dict[str, Tensor] = {}

    def compress(module: str, weight: Tensor) -> dict[str, Tensor]:
        codes, scale, zero_point = _unsigned(weight, 4, group_size, symmetric=False)
        weights[module] = _numbers(codes, scale, zero_point, torch.arange(weight.shape[1]) // group_size)
        return {
            "qweight": _interleave(codes.T),
            "qzeros": _interleave(zero_point.T),
            "scales": scale.T,
        }

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    return _rewrite(source, folder, compress, config), weights


def _interleave(codes: Tensor) -> Tensor:
    """Unsigned codes [R, N] in words [R, N / 8], the first four bits of each those of the first output."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, output::8].numpy().astype(np.uint32) << np.uint32(4 * place)
    return torch.from_numpy(words.view(np.int32))


def write_gptq(
    source: Path,
    folder: Path,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = False,
    version: str = "gptq",
    order: str = "none",
) -> tuple[Path, dict[str, Tensor]]:
    """A copy of a checkpoint in the GPTQ layout, and what its weights stand for, in float.

    `order`: "none" writes no g_idx, "plain" the trivial one, "activation" one of inputs in any order, the
    same for linears over the same input as GPTQ's is, "apart" another one for each linear.
    """
    weights: dict[str, Tensor] = {}

    def compress(module: str, weight: Tensor) -> dict[str, Tensor]:
        in_features = weight.shape[1]
        size = in_features if group_size == -1 else group_size
        groups = torch.arange(in_features) // size
        places = torch.arange(in_features)
        if order in ("activation", "apart"):
            seed = in_features if order == "activation" else crc32(module.encode())
            places = torch.randperm(in_features, generator=torch.Generator().manual_seed(seed))
            groups = groups[places.argsort()]
        codes, scale, zero_point = _unsigned(weight[:, places], bits, size, symmetric)
        codes = codes[:, places.argsort()]
        weights[module] = _numbers(codes, scale, zero_point, groups)
        stored_zeros = (zero_point - int(version == "gptq")) % (1 << bits)
        stored = {
            "qweight": _bits(codes, bits).T,
            "qzeros": _bits(stored_zeros.T, bits),
            "scales": scale.T,
        }
        return stored if order == "none" else {**stored, "g_idx": groups.to(torch.int32)}

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": order in ("activation", "apart"),
        "checkpoint_format": version,
    }
    return _rewrite(source, folder, compress, config), weights


def _bits(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes [R, C] as one string of bits a row, lowest bit first, in words [R, C * bits / 32]."""
    string = (codes.numpy()[..., None] >> np.arange(bits)) & 1
    packed = np.packbits(string.reshape(len(codes), -1).astype(np.uint8), axis=1, bitorder="little")
    return torch.from_numpy(packed.view("<i4").copy())


def _unsigned(weight: Tensor, bits: int, size: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], float16 scales [N, G] and zero points [N, G], the last group as short as it comes."""
    top = (1 << bits) - 1
    codes, scales, zeros = [], [], []
    for group in weight.split(size, 1):
        low, high = group.amin(1, True).clamp(max=0), group.amax(1, True).clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = ((high - low) / top).half()
        zero = torch.full_like(scale, (top + 1) // 2) if symmetric else (-low / scale.float()).round().half()
        codes.append((group / scale.float() + zero).round().clamp(0, top))
        scales.append(scale)
        zeros.append(zero.clamp(0, top))
    return torch.cat(codes, 1).int(), torch.cat(scales, 1), torch.cat(zeros, 1).int()


def _numbers(codes: Tensor, scale: Tensor, zero_point: Tensor, groups: Tensor) -> Tensor:
    return (codes - zero_point[:, groups]).float() * scale[:, groups].float()
