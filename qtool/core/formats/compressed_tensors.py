"""compressed-tensors' ``pack-quantized`` format: integer codes packed into int32 words.

A linear ``m`` becomes ``m.weight_packed`` [N, ceil(K*bits/32)] int32, ``m.weight_scale`` [N, G],
``m.weight_shape`` [2] and, when asymmetric, ``m.weight_zero_point`` packed along N.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from torch import Tensor

from qtool.core.qtensor import QuantizedTensor
from qtool.core.schemes import IntScheme
from qtool.errors import QtoolError

if TYPE_CHECKING:
    from qtool.core.checkpoint import Checkpoint


class CompressedTensors:
    """Reads ``pack-quantized`` weights."""

    def __init__(self, checkpoint: "Checkpoint") -> None:
        self._checkpoint = checkpoint
        self._where = checkpoint.path / "config.json"
        config = checkpoint.config["quantization_config"]
        if config.get("format") != "pack-quantized":
            raise QtoolError(
                f"{self._where}: compressed-tensors format {config.get('format')!r} is not supported; "
                "wanted 'pack-quantized'"
            )
        self._targets = [
            (target, self._scheme(name, group))
            for name, group in config.get("config_groups", {}).items()
            for target in group.get("targets", [])
        ]

    def _scheme(self, name: str, group: dict[str, Any]) -> IntScheme:
        where = f"{self._where}: quantization_config.config_groups.{name}"
        if group.get("input_activations") or group.get("output_activations"):
            raise QtoolError(f"{where}: quantized activations are not supported")
        weights = group.get("weights") or {}
        if weights.get("type") != "int" or weights.get("actorder") == "group":
            raise QtoolError(f"{where}: weights {weights} are not supported; wanted integers without g_idx")
        if weights.get("strategy") not in ("group", "channel"):
            raise QtoolError(f"{where}: strategy {weights.get('strategy')!r}, wanted 'group' or 'channel'")
        group_size = weights["group_size"] if weights["strategy"] == "group" else None
        return IntScheme(int(weights["num_bits"]), group_size, bool(weights.get("symmetric", True)))

    def quantizes(self, module: str) -> bool:
        """Whether `module` is stored packed."""
        return f"{module}.weight_packed" in self._checkpoint

    def read(self, module: str) -> QuantizedTensor:
        """Unpack one linear; a scale that is zero or not finite is an error that names the module."""
        try:
            return decode(module, self._scheme_of(module), self._checkpoint.tensor)
        except ValueError as error:
            raise QtoolError(f"{self._checkpoint.path}: {error}") from error

    def _scheme_of(self, module: str) -> IntScheme:
        for target, scheme in self._targets:
            if _matches(target, module):
                return scheme
        raise QtoolError(f"{self._where}: no config group targets {module}, though it is stored packed")


def _matches(target: str, module: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], module) is not None
    return target in (module, "Linear")


def decode(module: str, scheme: IntScheme, tensor: Callable[[str], Tensor]) -> QuantizedTensor:
    """The linear `module` from its stored tensors, got by full name; the inverse of `encode`.

    Raises ValueError for scales that are zero, not finite, or of the wrong shape.
    """
    shape = torch.Size(int(size) for size in tensor(f"{module}.weight_shape"))
    scale = tensor(f"{module}.weight_scale")
    if not bool((scale.isfinite() & (scale != 0)).all()):
        raise ValueError(f"{module}.weight_scale has zero or non-finite values")
    groups = scheme.num_groups(shape[1])
    if tuple(scale.shape) != (shape[0], groups):
        raise ValueError(
            f"{module}.weight_scale has shape {tuple(scale.shape)}, wanted {(shape[0], groups)} for {scheme}"
        )
    codes = unpack_from_int32(tensor(f"{module}.weight_packed"), scheme.num_bits, shape)
    zero_point = None
    if not scheme.symmetric:
        packed = tensor(f"{module}.weight_zero_point")
        zero_point = unpack_from_int32(packed, scheme.num_bits, scale.shape, packed_dim=0)
    return QuantizedTensor(codes.contiguous(), scale, zero_point, scheme)


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
    precision.
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
    }


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
