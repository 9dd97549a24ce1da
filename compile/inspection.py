"""What a checkpoint or an engine is: linears and their bits, bytes by part, what a token costs to keep."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from qtool.compile.backends.tensorrt.info import INFO, ProfileInfo, read_info
from qtool.compile.config import DecoderConfig, read_config
from qtool.compile.decoder import linear_shapes
from qtool.compile.engine import ENGINE, EngineSpec, check_files, read_spec
from qtool.compile.layout import places
from qtool.compile.roofline import Frozen, WeightBytes, part_of
from qtool.compile.targets import KV_PRECISIONS
from qtool.core.checkpoint import Checkpoint
from qtool.core.records import read_json
from qtool.errors import UsageError


class LinearRow(Frozen):
    """Linears of one name, shape and scheme."""

    name: str
    """With * for the numbers of layers and experts."""
    count: int
    out_features: int
    in_features: int
    scheme: str
    """As stored: the number format of dense ones."""
    bits: float
    """Of a weight, its scales and bias included."""
    bytes: int


class Inspection(Frozen):
    """What is known of a folder without running it."""

    path: str
    kind: str
    """checkpoint, or engine for a target."""
    architecture: str
    num_layers: int
    parameters: int
    max_context: int
    weight_bytes: int
    parts: dict[str, int]
    """Bytes of a checkpoint's tensors, by part of the model."""
    linears: tuple[LinearRow, ...]
    """Of a checkpoint."""
    kv_bytes_per_token: dict[str, int]
    """By the precision of keys and values; an engine has one."""
    engine: EngineSpec | None = None
    compute_capabilities: tuple[int, ...] = ()
    """Of a TensorRT engine."""
    profiles: tuple[ProfileInfo, ...] = ()
    """Of a TensorRT engine."""


def inspect(path: Path) -> tuple[Inspection, DecoderConfig, WeightBytes]:
    """Read what a checkpoint or engine folder says of itself, its decoder, and its bytes as steps read them.

    Weights stay on disk. Raises UsageError when the folder is neither, QtoolError when it is damaged.
    """
    if (path / ENGINE).is_file():
        return _engine(path, read_spec(path))
    if (path / "config.json").is_file():
        return _checkpoint(path)
    raise UsageError(f"{path}: holds neither {ENGINE} nor config.json; wanted an engine or a checkpoint")


def _checkpoint(path: Path) -> tuple[Inspection, DecoderConfig, WeightBytes]:
    checkpoint = Checkpoint(path)
    config = read_config(checkpoint.config, str(path / "config.json"))
    parts: Counter[str] = Counter()
    for name in checkpoint:
        parts[part_of(name)] += checkpoint.num_bytes(name)
    total = sum(parts.values())
    inspection = Inspection(
        path=str(path),
        kind="checkpoint",
        architecture=config.architecture,
        num_layers=config.num_layers,
        parameters=_parameters(config),
        max_context=config.max_context,
        weight_bytes=total,
        parts=dict(parts),
        linears=_linears(checkpoint, config),
        kv_bytes_per_token={
            name: config.num_layers * config.num_kv_heads * bytes_of(config.head_dim)
            for name, bytes_of in KV_PRECISIONS.items()
        },
    )
    table, experts = parts["embeddings"], parts["experts"]
    return inspection, config, WeightBytes(table=table, experts=experts, rest=total - table - experts)


def _engine(path: Path, spec: EngineSpec) -> tuple[Inspection, DecoderConfig, WeightBytes]:
    """Engines keep weights in forms of their own: bytes are shared out as the linears' sizes are."""
    check_files(path, spec)
    stored = read_json(path / "config.json")
    config = read_config(stored, str(path / "config.json"))
    info = read_info(path) if (path / INFO).is_file() else None
    weight_bytes = spec.weight_bytes if info is None else info.weight_bytes
    inspection = Inspection(
        path=str(path),
        kind=f"engine for {spec.target}",
        architecture=spec.architecture,
        num_layers=spec.num_layers,
        parameters=_parameters(config),
        max_context=spec.max_context,
        weight_bytes=weight_bytes,
        parts={},
        linears=(),
        kv_bytes_per_token={spec.kv_cache: spec.kv_bytes_per_token},
        engine=spec,
        compute_capabilities=() if info is None else info.compute_capabilities,
        profiles=() if info is None else info.profiles,
    )
    table = min(config.vocab_size * config.hidden_size * _item_size(stored), weight_bytes)
    experts = round((weight_bytes - table) * _expert_share(config))
    return inspection, config, WeightBytes(table=table, experts=experts, rest=weight_bytes - table - experts)


def _item_size(config: dict[str, Any]) -> int:
    return 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2


def _expert_share(config: DecoderConfig) -> float:
    sizes = {name: rows * columns for name, (rows, columns) in linear_shapes(config).items()}
    return sum(size for name, size in sizes.items() if part_of(name) == "experts") / sum(sizes.values())


def _parameters(config: DecoderConfig) -> int:
    """Weights of the linears and of the table; norms and biases are some thousandths."""
    linears = sum(rows * columns for rows, columns in linear_shapes(config).values())
    return linears + config.vocab_size * config.hidden_size


def _linears(checkpoint: Checkpoint, config: DecoderConfig) -> tuple[LinearRow, ...]:
    shapes = linear_shapes(config)
    stored: dict[str, tuple[int, int]] = {}
    for name, place in places(config).items():  # of linears stored as one, the last has all rows
        stored[place.module] = (place.rows.stop, shapes[name][1])
    module_bytes: Counter[str] = Counter()
    for name in checkpoint:
        module_bytes[name.rpartition(".")[0]] += checkpoint.num_bytes(name)
    schemes = checkpoint.schemes()
    alike: dict[tuple[str, tuple[int, int], str], list[int]] = {}
    for module, shape in stored.items():
        scheme = str(schemes.get(module) or checkpoint.dtype(f"{module}.weight"))
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", module)
        alike.setdefault((pattern, shape, scheme), []).append(module_bytes[module])
    return tuple(
        LinearRow(
            name=name,
            count=len(sizes),
            out_features=shape[0],
            in_features=shape[1],
            scheme=scheme,
            bits=sum(sizes) * 8 / (len(sizes) * shape[0] * shape[1]),
            bytes=sum(sizes),
        )
        for (name, shape, scheme), sizes in alike.items()
    )
