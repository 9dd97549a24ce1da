"""compressed-tensors' ``quantization_config``, as `config_groups` reads it."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qtool.core.formats.layouts import layout_of
from qtool.core.formats.naming import brief, regex
from qtool.core.schemes import (
    ActivationScheme,
    Fp4Scheme,
    Fp8Scheme,
    KvCacheScheme,
    LinearScheme,
    WeightScheme,
)

_FP8_SCALES = {"scale_dtype": "torch.float8_e4m3fn"}
_E8M0_SCALES = {"scale_dtype": "torch.uint8"}


def write_groups(
    schemes: Mapping[str, LinearScheme], dense: Sequence[str], kv_cache: KvCacheScheme | None
) -> dict[str, Any]:
    """The config of a checkpoint: `schemes` by linear, and every linear that is `dense`."""
    groups: dict[LinearScheme, list[str]] = defaultdict(list)
    for module, scheme in schemes.items():
        groups[scheme].append(module)
    layouts = {layout_of(scheme) for scheme in groups}
    every = [*schemes, *dense]
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision" if layouts else "dense",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{index}": {
                "targets": _patterns(modules, every),
                "weights": _weights(scheme.weight),
                "input_activations": None if scheme.activation is None else _activations(scheme.activation),
                "output_activations": None,
                "format": layout_of(scheme),
            }
            for index, (scheme, modules) in enumerate(groups.items())
        },
        "ignore": _patterns(dense, every),
        "kv_cache_scheme": None if kv_cache is None else _kv_cache(kv_cache),
    }


def _weights(scheme: WeightScheme) -> dict[str, Any]:
    if isinstance(scheme, Fp4Scheme):
        nvfp4 = scheme.kind == "nvfp4"
        return _args(
            4,
            "float",
            strategy="tensor_group" if nvfp4 else "group",
            group_size=scheme.group_size,
            **(_FP8_SCALES if nvfp4 else _E8M0_SCALES),
        )
    if isinstance(scheme, Fp8Scheme):
        if scheme.columns is None:
            return _args(8, "float", strategy="tensor" if scheme.rows is None else "channel")
        if scheme.rows == 1:
            return _args(8, "float", strategy="group", group_size=scheme.columns)
        return _args(8, "float", strategy="block", block_structure=[scheme.rows, scheme.columns])
    return _args(
        scheme.num_bits,
        "int",
        symmetric=scheme.symmetric,
        strategy="channel" if scheme.group_size is None else "group",
        group_size=scheme.group_size,
    )


def _activations(scheme: ActivationScheme) -> dict[str, Any]:
    if scheme.kind == "nvfp4":
        return _args(
            4, "float", strategy="tensor_group", dynamic="local", group_size=scheme.group_size, **_FP8_SCALES
        )
    strategy = "tensor" if not scheme.dynamic else "token" if scheme.group_size is None else "group"
    return _args(
        8,
        "int" if scheme.kind == "int8" else "float",
        symmetric=scheme.symmetric,
        strategy=strategy,
        dynamic=scheme.dynamic,
        group_size=scheme.group_size,
    )


def _kv_cache(scheme: KvCacheScheme) -> dict[str, Any]:
    kind = "int" if scheme.kind == "int8" else "float"
    return _args(8, kind, strategy="attn_head" if scheme.per_head else "tensor")


def _args(num_bits: int, kind: str, **others: Any) -> dict[str, Any]:
    return {
        "num_bits": num_bits,
        "type": kind,
        "symmetric": True,
        "group_size": None,
        "dynamic": False,
    } | others


def _patterns(modules: Iterable[str], every: Sequence[str]) -> list[str]:
    return [parts[0] if len(parts) == 1 else f"re:{regex(parts)}" for parts in brief(modules, every)]
