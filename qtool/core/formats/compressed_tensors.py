"""compressed-tensors' formats: integer codes packed into int32 words, or int8 and float8 codes as they are.

Packed, a linear ``m`` becomes ``m.weight_packed`` [N, ceil(K*bits/32)] int32, ``m.weight_scale`` [N, G],
``m.weight_shape`` [2] and, when asymmetric, ``m.weight_zero_point`` packed along N. Otherwise it is
``m.weight`` [N, K] with ``m.weight_scale`` and, when asymmetric, ``m.weight_zero_point`` [N, G]. Static
activations add ``m.input_scale`` and ``m.input_zero_point``.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from torch import Tensor

from qtool.core.activation import Activation
from qtool.core.formats.config_groups import PACKED, Group, read_groups
from qtool.core.formats.input_order import read_order
from qtool.core.formats.parts import Parts
from qtool.core.qtensor import Fp8Tensor, Linear, QuantizedTensor
from qtool.core.schemes import ActivationScheme, Fp8Scheme, IntScheme, LinearScheme
from qtool.errors import QtoolError

if TYPE_CHECKING:
    from qtool.core.checkpoint import Checkpoint


class CompressedTensors:
    """Reads ``pack-quantized``, ``int-quantized``, ``float-quantized`` and ``naive-quantized`` linears."""

    def __init__(self, checkpoint: "Checkpoint") -> None:
        self._checkpoint = checkpoint
        self._where = str(checkpoint.path / "config.json")
        self._groups = read_groups(checkpoint.config["quantization_config"], self._where)

    def quantizes(self, module: str) -> bool:
        """Whether a config group targets `module`."""
        return self._groups.find(module) is not None

    def scheme(self, module: str) -> LinearScheme:
        """The scheme of the config group that targets `module`."""
        return self._group(module).scheme

    def read(self, module: str) -> Linear:
        """Read one linear; QtoolError names the tensor that is missing or damaged."""
        parts, group = Parts(self._checkpoint, module), self._group(module)
        scheme, inputs = group.scheme.weight, group.scheme.activation
        activation = None if inputs is None else _activation(parts, inputs)
        if isinstance(scheme, Fp8Scheme):
            return Linear(_fp8(parts, scheme), None, activation=activation)
        if group.layout != PACKED:
            return Linear(_int8(parts, scheme), None, activation=activation)
        weight, order = self._packed(parts, scheme, group.reordered)
        return Linear(weight, None, order, activation)

    def _group(self, module: str) -> Group:
        group = self._groups.find(module)
        if group is None:
            raise QtoolError(f"{self._where}: no config group targets {module}")
        return group

    def _packed(
        self, parts: Parts, scheme: IntScheme, reordered: bool
    ) -> tuple[QuantizedTensor, Tensor | None]:
        try:
            weight = decode(parts.module, scheme, self._checkpoint.tensor)
        except ValueError as error:
            raise QtoolError(f"{self._checkpoint.path}: {error}") from error
        if not reordered or scheme.group_size is None:
            return weight, None
        order = read_order(parts, "weight_g_idx", weight.shape[1], scheme.group_size)
        if order is None:
            return weight, None
        return replace(weight, codes=weight.codes[:, order].contiguous()), order


def _int8(parts: Parts, scheme: IntScheme) -> QuantizedTensor:
    out_features, in_features = parts.shape("weight")
    if scheme.group_size is not None and in_features % scheme.group_size:
        raise parts.error("weight", f"has {in_features} inputs, which its scheme, {scheme}, does not divide")
    codes = parts.read("weight", torch.int8, (out_features, in_features))
    if int(codes.min()) < scheme.low or int(codes.max()) > scheme.high:
        raise parts.error("weight", f"has codes outside of {scheme.low} to {scheme.high}")
    shape = (out_features, scheme.num_groups(in_features))
    scale = parts.scale("weight_scale", shape, *_ONE).expand(shape).contiguous()
    if scheme.symmetric:
        return QuantizedTensor(codes, scale, None, scheme)
    zero_point = parts.read("weight_zero_point", torch.int8, shape, *_ONE)
    return QuantizedTensor(codes, scale, zero_point.expand(shape).contiguous(), scheme)


def _fp8(parts: Parts, scheme: Fp8Scheme) -> Fp8Tensor:
    shape = parts.shape("weight")
    codes = parts.read("weight", torch.float8_e4m3fn, shape)
    if not bool(codes.float().isfinite().all()):
        raise parts.error("weight", "has codes that are no numbers; the checkpoint is damaged")
    grid = scheme.grid(*shape)
    return Fp8Tensor(
        codes, parts.scale("weight_scale", grid, *(_ONE if grid == (1, 1) else ())).expand(grid), scheme
    )


def _activation(parts: Parts, scheme: ActivationScheme) -> Activation:
    if scheme.dynamic:
        return Activation(scheme)
    scale = parts.scale("input_scale", *_ONE).item()
    if scheme.symmetric:
        return Activation(scheme, scale)
    return Activation(scheme, scale, int(parts.read("input_zero_point", torch.int8, *_ONE).item()))


_ONE = ((1,), ())
"""The shapes of a single number."""


def decode(module: str, scheme: IntScheme, tensor: Callable[[str], Tensor]) -> QuantizedTensor:
    """The linear `module` from its stored tensors, got by full name; the inverse of `encode`.

    Raises ValueError for tensors of the wrong shape and scales that are zero or not finite.
    """
    bits, shape = scheme.num_bits, torch.Size(int(size) for size in tensor(f"{module}.weight_shape"))
    groups = scheme.num_groups(shape[1])
    if groups * (scheme.group_size or shape[1]) != shape[1]:
        raise ValueError(f"{module}.weight_shape gives {shape[1]} inputs, which {scheme} does not divide")

    def stored(part: str, *wanted: int) -> Tensor:
        found = tensor(f"{module}.{part}")
        if tuple(found.shape) != wanted:
            raise ValueError(f"{module}.{part} has shape {tuple(found.shape)}, wanted {wanted} for {scheme}")
        return found

    scale = stored("weight_scale", shape[0], groups)
    if not bool((scale.isfinite() & (scale != 0)).all()):
        raise ValueError(f"{module}.weight_scale has zero or non-finite values")
    packed = stored("weight_packed", shape[0], -(-shape[1] * bits // 32))
    codes = unpack_from_int32(packed, bits, shape).contiguous()
    if scheme.symmetric:
        return QuantizedTensor(codes, scale, None, scheme)
    packed = stored("weight_zero_point", -(-shape[0] * bits // 32), groups)
    zero_point = unpack_from_int32(packed, bits, scale.shape, packed_dim=0)
    return QuantizedTensor(codes, scale, zero_point, scheme)


def encode(module: str, weight: QuantizedTensor) -> dict[str, Tensor]:
    """The tensors that store `weight` as the linear `module`."""
    bits = weight.scheme.num_bits
    tensors = {
        f"{module}.weight_packed": pack_to_int32(weight.codes, bits),
        f"{module}.weight_scale": weight.scale,
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }
    if weight.zero_point is not None:
        tensors[f"{module}.weight_zero_point"] = pack_to_int32(weight.zero_point, bits, packed_dim=0)
    return tensors


def config(schemes: Mapping[str, IntScheme], dense: list[str]) -> dict[str, Any]:
    """``quantization_config`` for a checkpoint.

    `schemes` gives each quantized linear its scheme; `dense` lists every linear that stays in full
    precision. ``dequantize`` makes transformers unpack weights while it loads them instead of before the
    first forward pass; other engines pass over it.
    """
    groups: dict[IntScheme, list[str]] = defaultdict(list)
    for module, scheme in schemes.items():
        groups[scheme].append(module)
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": _patterns(modules, set(schemes) | set(dense)),
                "weights": {
                    "num_bits": scheme.num_bits,
                    "type": "int",
                    "symmetric": scheme.symmetric,
                    "strategy": "channel" if scheme.group_size is None else "group",
                    "group_size": scheme.group_size,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
            for index, (scheme, modules) in enumerate(groups.items())
        },
        "ignore": _patterns(dense, set(schemes) | set(dense)),
        # compressed-tensors 0.20 makes transformers no room for packed zero points, unless it unpacks them
        **({"dequantize": True} if [scheme.symmetric for scheme in groups] == [False] else {}),
    }


def transformers_loads(schemes: Collection[IntScheme]) -> bool:
    """Whether transformers (as of 5.24) loads linears of these schemes from one checkpoint.

    It does unless some have zero points and some another scheme: zero points need `config` to ask that it
    unpacks, and then it takes the first group's scheme for every linear.
    """
    return len(set(schemes)) == 1 or all(scheme.symmetric for scheme in schemes)


def _patterns(modules: list[str], every: set[str]) -> list[str]:
    """Name `modules` briefly: one pattern for a linear of every layer, each name where layers differ."""
    every_like: dict[str, set[str]] = defaultdict(set)
    for module in every:
        every_like[_any_layer(module)].add(module)
    chosen: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        chosen[_any_layer(module)].append(module)
    patterns: list[str] = []
    for like, members in chosen.items():
        whole = len(members) > 1 and set(members) == every_like[like]
        patterns += [f"re:{like}$"] if whole else members
    return patterns


def _any_layer(module: str) -> str:
    return r"\d+".join(re.escape(part) for part in re.split(r"(?<=\.)\d+(?=\.)", module))
