"""How quantized tensors lie on disk: one file a format, found by ``quant_method`` in config.json."""

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from qtool.core.qtensor import Linear
from qtool.core.schemes import LinearScheme
from qtool.errors import QtoolError, nearest

if TYPE_CHECKING:
    from qtool.core.checkpoint import Checkpoint

FORMATS = {
    "compressed-tensors": "qtool.core.formats.compressed_tensors:CompressedTensors",
    "awq": "qtool.core.formats.autoawq:AutoAwq",
    "gptq": "qtool.core.formats.gptq:GptqFormat",
}


class QuantizationFormat(Protocol):
    """Reads the quantized linears of one checkpoint."""

    def __init__(self, checkpoint: "Checkpoint") -> None: ...

    def quantizes(self, module: str) -> bool:
        """Whether the linear layer `module` is stored quantized."""
        ...

    def scheme(self, module: str) -> LinearScheme:
        """What the quantized linear `module` computes with, known without reading it."""
        ...

    def read(self, module: str) -> Linear:
        """The quantized linear `module`, without its bias; QtoolError names what is wrong with it."""
        ...


def open_format(checkpoint: "Checkpoint") -> QuantizationFormat | None:
    """The reader for a checkpoint's quantized tensors; None for a checkpoint that is not quantized."""
    config = checkpoint.config.get("quantization_config")
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
    module, _, name = FORMATS[method].partition(":")
    reader: type[QuantizationFormat] = getattr(import_module(module), name)
    return reader(checkpoint)
