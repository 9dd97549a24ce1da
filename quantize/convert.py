"""Write a quantized checkpoint in another format: the same numbers, laid out otherwise."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from qtool.core.checkpoint import COMPANIONS, Checkpoint
from qtool.core.files import new_folder, refuse_existing
from qtool.core.formats import find_writer
from qtool.core.formats.contract import Contents, Writer
from qtool.errors import UsageError
from qtool.quantize.shards import Shards

_SHARD_BYTES = 1_000_000_000


def convert_checkpoint(
    checkpoint: Path,
    output: Path,
    format_name: str,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write `checkpoint` at `output` in the format `format_name`, tokenizer and config beside it.

    Codes, scales and zero points stand for the same numbers afterwards; what the format cannot hold exactly
    is a UsageError that names the linear. Memory holds one shard. `output` appears whole, at the end.
    `progress` is told how many tensors are done, and of how many.
    """
    refuse_existing(output)
    source = Checkpoint(checkpoint)
    schemes = source.schemes()
    if source.format is None or not schemes:
        raise UsageError(
            f"{checkpoint}: holds no quantized linears, which is what formats differ in; make some with "
            "'qtool quantize'"
        )
    shapes = {module: source.format.shape(module) for module in schemes}
    writer = find_writer(format_name)(
        Contents(schemes, shapes, _dense(source, set(schemes)), source.kv_cache)
    )
    with new_folder(output) as folder:
        shards, total = Shards(folder, shard_bytes), len(list(source))
        for done, tensors in _encoded(source, set(schemes), writer):
            shards.add(tensors)
            progress(done, total)
        shards.finish()
        config = source.config | {"quantization_config": writer.config()}
        for name, content in {"config.json": config, **writer.files()}.items():
            (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for name in COMPANIONS:
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, folder / name)


def _dense(source: Checkpoint, quantized: set[str]) -> list[str]:
    """The linears that stay as they are. A tied head is one, though it is not stored."""
    matrices = [name for name in source if name.endswith(".weight") and len(source.shape(name)) == 2]
    modules = {name.removesuffix(".weight") for name in matrices if "embed" not in name}
    return sorted((modules | {"lm_head"}) - quantized)


def _encoded(
    source: Checkpoint, quantized: set[str], writer: Writer
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """The number of stored tensors that are done, and what became of the latest."""
    names = sorted(source)
    scales = {name: name.rpartition(".k_")[0].removesuffix(".k_proj") for name in names if "k_scale" in name}
    written: set[str] = set()
    for done, name in enumerate(names, 1):
        module, _, part = name.rpartition(".")
        if part in ("k_scale", "v_scale"):
            if source.kv_cache is not None and name in scales:
                yield done, writer.encode_kv(scales[name], source.kv_scales(scales[name]))
        elif module not in quantized or part == "bias":
            yield done, {name: source.tensor(name)}
        elif module not in written:
            written.add(module)
            yield done, writer.encode(module, source.linear(module))
