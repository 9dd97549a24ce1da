"""How quantized tensors lie on disk: one file a format, found by ``quant_method`` in config.json."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qtool.core.formats.promises import refuse_unread
from qtool.errors import QtoolError, UsageError, nearest

if TYPE_CHECKING:
    from qtool.core.formats.contract import QuantizationFormat, Writer
    from qtool.core.formats.tensors import StoredModel

FORMATS = {
    "compressed-tensors": "qtool.core.formats.compressed_tensors:CompressedTensors",
    "awq": "qtool.core.formats.autoawq:AutoAwq",
    "gptq": "qtool.core.formats.gptq:GptqFormat",
    "modelopt": "qtool.core.formats.modelopt:ModelOpt",
    "fp8": "qtool.core.formats.block_fp8:BlockFp8",
}
"""Readers, by ``quant_method``."""

WRITERS = {
    "compressed-tensors": "qtool.core.formats.compressed_tensors:CompressedTensorsWriter",
    "awq": "qtool.core.formats.autoawq:AutoAwqWriter",
    "gptq": "qtool.core.formats.gptq_writer:GptqWriter",
    "gptq_v2": "qtool.core.formats.gptq_writer:GptqV2Writer",
    "modelopt": "qtool.core.formats.modelopt_writer:ModelOptWriter",
    "fp8": "qtool.core.formats.block_fp8:BlockFp8Writer",
}
"""Writers, by the name that a person gives."""


def open_format(checkpoint: "StoredModel") -> "QuantizationFormat | None":
    """The reader for a checkpoint's quantized tensors; None for a checkpoint that is not quantized.

    Raises QtoolError for what is stored, or said of it, and would not be read.
    """
    config = checkpoint.config.get("quantization_config")
    if config is None:  # ModelOpt's exports said it in a file of their own before config.json knew of it
        config = (
            {"quant_method": "modelopt"} if (checkpoint.path / "hf_quant_config.json").is_file() else None
        )
    if config is None:
        return None
    if not isinstance(config, dict):
        raise QtoolError(
            f"{checkpoint.path / 'config.json'}: quantization_config is {config!r}, wanted an object"
        )
    method = str(config.get("quant_method"))
    if method not in FORMATS:
        raise QtoolError(
            f"{checkpoint.path / 'config.json'}: quant_method {method!r} is not supported; "
            + nearest(method, FORMATS)
        )
    kind: type[QuantizationFormat] = _load(FORMATS[method])
    reader = kind(checkpoint)
    refuse_unread(checkpoint, reader)
    return reader


def check_writer(name: str) -> None:
    """Raise UsageError, which lists the known ones, for a format that has no writer."""
    if name not in WRITERS:
        raise UsageError(f"format {name!r} is not written; {nearest(name, WRITERS)}")


def find_writer(name: str) -> "type[Writer]":
    """The writer of a format; UsageError lists the known ones."""
    check_writer(name)
    writer: type[Writer] = _load(WRITERS[name])
    return writer


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
