"""What engines can be compiled for, and what is refused before a checkpoint is opened.

Imports nothing heavy, so that a request that cannot be is answered at once.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qtool.compile.abilities import Abilities
from qtool.core.recipe import OpenVinoOptions, TensorRtOptions
from qtool.errors import UsageError, nearest


@dataclass(frozen=True)
class Target:
    """What an engine can be compiled for."""

    write: str
    """``module:function`` that writes the model: (checkpoint, config, folder, hidden_layers) -> None."""
    weights: str
    """The pattern of the files in that folder that hold them."""
    abilities: Abilities
    block_size: int
    kv_bytes: Mapping[str, Callable[[int], int]]
    """For each precision of the KV pool, the most exact first: bytes of one head's key and value."""
    on_cpu: bool = True
    """It runs on the machine that compiles it: on any CPU."""
    takes_options: bool = False
    """`write` also takes target, tensorrt and progress by name."""


def _quantized_kv(head_dim: int) -> int:
    """A byte a feature; float32 scale and zero point of a key's feature in a block, of each value."""
    return head_dim + head_dim * 8 // 32 + head_dim + 8


_WHOLE_KV: dict[str, Callable[[int], int]] = {
    "f32": lambda head_dim: 2 * 4 * head_dim,
    "f16": lambda head_dim: 2 * 2 * head_dim,
}
_OPENVINO_KV = {"f32": ("f32", "f16", "u8"), "bf16": ("bf16", "u8")}
"""The pools that OpenVINO's attention takes, by the precision it computes in."""
TARGETS: dict[str, Target] = {
    "openvino": Target(
        "qtool.compile.backends.openvino:write",
        weights="*.bin",
        abilities=Abilities(),
        block_size=32,  # the CPU plugin's own
        kv_bytes={**_WHOLE_KV, "bf16": _WHOLE_KV["f16"], "u8": _quantized_kv},
    ),
    "onnx": Target(
        "qtool.compile.backends.onnx:write",
        weights="*.data",
        abilities=Abilities(),
        block_size=32,
        kv_bytes={"f32": _WHOLE_KV["f32"]},
    ),
    "reference": Target(
        "qtool.compile.backends.reference:write",
        weights="*.safetensors",
        abilities=Abilities(),
        block_size=32,
        kv_bytes=_WHOLE_KV,
    ),
    **dict.fromkeys(
        ("tensorrt-rtx", "tensorrt"),
        Target(
            "qtool.compile.backends.tensorrt.backend:write",
            weights="*.plan",
            abilities=Abilities(only_codes=True),
            block_size=32,
            kv_bytes={"f16": _WHOLE_KV["f16"]},
            on_cpu=False,
            takes_options=True,
        ),
    ),
}


KV_PRECISIONS = {name: bytes_of for target in TARGETS.values() for name, bytes_of in target.kv_bytes.items()}
"""Bytes of a head's key and value, by the pool's precision."""


def check_target(
    target: str,
    kv_cache: str | None,
    tensorrt: TensorRtOptions | None,
    openvino: OpenVinoOptions | None = None,
) -> str:
    """The precision of the KV pool that these options give; UsageError where the target can't have them."""
    if target not in TARGETS:
        raise UsageError(
            f"target {target!r} is unknown; {nearest(target, TARGETS)} (known: {', '.join(sorted(TARGETS))})"
        )
    if tensorrt is not None and not TARGETS[target].takes_options:
        raise UsageError(f"target {target} has no use for the options of TensorRT; leave them out")
    if tensorrt is not None and tensorrt.attention == "plugin" and target != "tensorrt":
        raise UsageError(f"target {target} has no plugins; leave attention: plugin out")
    if openvino is not None and target != "openvino":
        raise UsageError(f"target {target} has no use for the options of OpenVINO; leave them out")
    possible, of = list(TARGETS[target].kv_bytes), f"target {target}"
    if target == "openvino":
        precision = (openvino or OpenVinoOptions()).precision
        possible, of = list(_OPENVINO_KV[precision]), f"{of} in precision {precision}"
    kv_cache = kv_cache or possible[0]
    if kv_cache not in possible:
        raise UsageError(f"kv_cache {kv_cache!r} is not possible for {of}; wanted {', '.join(possible)}")
    return kv_cache
