"""What compressed-tensors' ``quantization_config`` says of each linear."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtool.core.formats.layouts import FP4, PACKED, PLAIN
from qtool.core.formats.promises import refuse_unknown
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
from qtool.errors import QtoolError

_CONFIG = (
    "quant_method",
    "format",
    "config_groups",
    "ignore",
    "kv_cache_scheme",
    "sparsity_config",
    "transform_config",
    # of how it was made, or is to be loaded
    "quantization_status",
    "global_compression_ratio",
    "version",
    "dequantize",
    "run_compressed",
)
_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
_ARGS = (
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "block_structure",
    "dynamic",
    "actorder",
    # of how ranges were found, and of what the stored tensors tell themselves
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "zp_dtype",
)


@dataclass(frozen=True)
class Group:
    """A config group: the linears that it targets, their scheme, and the layout they are stored in."""

    targets: tuple[str, ...]
    scheme: LinearScheme
    layout: str
    reordered: bool
    """Groups of inputs are given by a stored g_idx."""


@dataclass(frozen=True)
class ConfigGroups:
    """The groups of one config, and the linears that none of them applies to."""

    groups: tuple[Group, ...]
    ignore: tuple[str, ...]
    kv_cache: KvCacheScheme | None

    def find(self, module: str) -> Group | None:
        """The group of a linear; targets that name it go before patterns, and these before ``Linear``."""
        if any(_rank(target, module) is not None for target in self.ignore):
            return None
        ranked = [
            (rank, index)
            for index, group in enumerate(self.groups)
            for target in group.targets
            if (rank := _rank(target, module)) is not None
        ]
        return self.groups[min(ranked)[1]] if ranked else None


def _rank(target: str, module: str) -> int | None:
    """How exactly a target means a linear, 0 most; None: not at all."""
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target[3:], module) else None
    return 2 if target == "Linear" else None


def read_groups(config: Mapping[str, Any], where: str) -> ConfigGroups:
    """Read a ``quantization_config``; `where` names the file in errors.

    Raises QtoolError for anything that changes the numbers and is not supported.
    """
    refuse_unknown(config, _CONFIG, f"{where}: quantization_config")
    if config.get("transform_config"):
        raise QtoolError(f"{where}: quantization_config.transform_config is not supported; wanted none")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise QtoolError(
            f"{where}: quantization_config.sparsity_config is not supported; wanted dense weights"
        )
    return ConfigGroups(
        tuple(
            _group(group, config.get("format"), f"{where}: quantization_config.config_groups.{name}")
            for name, group in (config.get("config_groups") or {}).items()
        ),
        tuple(config.get("ignore") or ()),
        _kv_cache(config.get("kv_cache_scheme"), f"{where}: quantization_config.kv_cache_scheme"),
    )


def _group(group: Mapping[str, Any], layout: str | None, where: str) -> Group:
    refuse_unknown(group, _GROUP, where)
    layout = group.get("format") or layout
    known = (PACKED, *PLAIN, *FP4.values())
    if layout not in known:
        raise QtoolError(f"{where}: format {layout!r} is not supported; wanted one of {', '.join(known)}")
    if group.get("output_activations"):
        raise QtoolError(f"{where}: quantized output_activations are not supported")
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    scheme = LinearScheme(_weights(weights, where), _activations(inputs, where) if inputs else None)
    weight = scheme.weight
    held = (
        layout == FP4[weight.kind]
        if isinstance(weight, Fp4Scheme)
        else layout in PLAIN or (layout == PACKED and isinstance(weight, IntScheme))
    )
    if not held:
        raise QtoolError(f"{where}: format {layout!r} does not hold {weight}")
    return Group(
        tuple(group.get("targets") or ()), scheme, layout, weights.get("actorder") in ("group", "dynamic")
    )


def _weights(args: Mapping[str, Any], where: str) -> WeightScheme:
    _check_args(args, f"{where}.weights")
    bits, kind, strategy = args.get("num_bits"), args.get("type"), args.get("strategy")
    symmetric, size = bool(args.get("symmetric", True)), args.get("group_size")
    if (
        kind == "int"
        and isinstance(bits, int)
        and 2 <= bits <= 8
        and strategy in ("group", "channel", "tensor")
    ):
        return IntScheme(bits, size if strategy == "group" else None, symmetric)
    if kind == "float" and bits == 8 and symmetric:
        rows, columns = args.get("block_structure") or (None, None)
        blocks = {"tensor": (None, None), "channel": (1, None), "group": (1, size), "block": (rows, columns)}
        if strategy in blocks:
            return Fp8Scheme(*blocks[strategy])
    if kind == "float" and bits == 4 and symmetric:
        fp4 = Fp4Scheme("nvfp4" if strategy == "tensor_group" else "mxfp4")
        if strategy in ("tensor_group", "group") and size == fp4.group_size:
            return fp4
    raise QtoolError(
        f"{where}: weights {_said(args)} are not supported; wanted integers of 2 to 8 bits in groups, "
        "channels or one tensor, or symmetric fp8, with blocks as well, nvfp4 or mxfp4"
    )


def _activations(args: Mapping[str, Any], where: str) -> ActivationScheme:
    _check_args(args, f"{where}.input_activations")
    kind, strategy, dynamic = args.get("type"), args.get("strategy"), args.get("dynamic")
    symmetric = bool(args.get("symmetric", True))
    runs = (dynamic is True and strategy in ("token", "group")) or (dynamic is False and strategy == "tensor")
    if args.get("num_bits") == 8 and runs and (kind == "int" or (kind == "float" and symmetric)):
        size = args.get("group_size") if strategy == "group" else None
        return ActivationScheme("int8" if kind == "int" else "fp8", bool(dynamic), symmetric, size)
    local = dynamic == "local" and strategy == "tensor_group" and args.get("group_size") == 16
    if args.get("num_bits") == 4 and kind == "float" and symmetric and local:
        return NVFP4_ACTIVATIONS
    raise QtoolError(
        f"{where}: input_activations {_said(args)} are not supported; wanted int8 or symmetric fp8, static "
        "with one scale or dynamic per token (a dynamic scale for all tokens would depend on what else runs),"
        " or nvfp4"
    )


def _kv_cache(args: Mapping[str, Any] | None, where: str) -> KvCacheScheme | None:
    if not args:
        return None
    _check_args(args, where)
    kind, strategy = args.get("type"), args.get("strategy") or "tensor"
    plain = args.get("num_bits") == 8 and args.get("symmetric", True) and not args.get("dynamic")
    if plain and kind in ("int", "float") and strategy in ("tensor", "attn_head"):
        return KvCacheScheme("int8" if kind == "int" else "fp8", strategy == "attn_head")
    raise QtoolError(
        f"{where} {_said(args)} is not supported; wanted symmetric int8 or fp8 with calibrated scales, one a "
        "layer (tensor) or one a KV head (attn_head)"
    )


def _check_args(args: Mapping[str, Any], where: str) -> None:
    """Refuse unknown fields, and sizes that the strategy has no use for."""
    refuse_unknown(args, _ARGS, where)
    strategy, size = args.get("strategy"), args.get("group_size")
    blocks = args.get("block_structure")
    if (blocks and strategy != "block") or (
        size not in (None, -1) and strategy not in ("group", "tensor_group")
    ):
        raise QtoolError(f"{where}: {_said(args)} gives a size that strategy {strategy!r} has no use for")


def _said(args: Mapping[str, Any]) -> str:
    fields = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic")
    return str({field: args[field] for field in fields if args.get(field) is not None})
