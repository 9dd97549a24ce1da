"""Engine drivers: each runs steps on one kind of engine, over a KV pool that it allocates."""

from pathlib import Path

from qtool.compile.engine import ENGINE, check_files, read_spec
from qtool.core.lazy import load
from qtool.errors import QtoolError, UsageError, nearest
from qtool.runtime.engines.contract import Engine

DRIVERS = {
    "onnx": "qtool.runtime.engines.onnx:open_onnx",
    "openvino": "qtool.runtime.engines.openvino:open_openvino",
    "reference": "qtool.runtime.engines.reference:open_reference",
    "tensorrt": "qtool.runtime.engines.tensorrt:open_tensorrt",
    "tensorrt-rtx": "qtool.runtime.engines.tensorrt:open_tensorrt",
}


def open_engine(
    path: Path,
    *,
    kv_cache_tokens: int | None = None,
    threads: int | None = None,
    device: str | None = None,
) -> Engine:
    """Open an engine folder, or a checkpoint folder with the reference engine.

    `kv_cache_tokens` sizes the KV pool; see `pool.num_blocks` for the default. `threads` None leaves the
    number to the engine. `device` is for the reference engine alone: cpu, or cuda for the torch engine on a
    GPU. Raises UsageError when the folder is neither, and for a device that the engine can't have.
    """
    if (path / ENGINE).is_file():
        spec = read_spec(path)
        target = spec.target
        if target not in DRIVERS:
            raise QtoolError(f"{path / ENGINE}: target {target!r} has no driver; {nearest(target, DRIVERS)}")
        check_files(path, spec)
    elif (path / "config.json").is_file():
        target = "reference"
    else:
        raise UsageError(f"{path}: holds neither {ENGINE} nor config.json; wanted an engine or a checkpoint")
    if device is not None and target != "reference":
        raise UsageError(
            f"{path}: an engine for {target} runs where that runs; leave --device out, which is for "
            "checkpoints and engines of target reference"
        )
    chosen = {} if device is None else {"device": device}
    engine: Engine = load(DRIVERS[target], extra=target)(path, kv_cache_tokens, threads, **chosen)
    return engine


def max_context(path: Path) -> int:
    """Tokens that one sequence can have, read before an engine or checkpoint folder is opened.

    Raises UsageError when the folder is neither.
    """
    if (path / ENGINE).is_file():
        return read_spec(path).max_context
    if (path / "config.json").is_file():
        # A checkpoint is read with torch, which serving an engine does without.
        from qtool.compile.config import read_config
        from qtool.core.checkpoint import Checkpoint

        return read_config(Checkpoint(path).config, str(path / "config.json")).max_context
    raise UsageError(f"{path}: holds neither {ENGINE} nor config.json; wanted an engine or a checkpoint")
