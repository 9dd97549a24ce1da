"""How quantized tensors lie on disk: one file a format, found by ``quant_method`` in config.json."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from qtool.core.formats.kv_cache import KvLayout
from qtool.core.formats.promises import refuse_unread
from qtool.core.qtensor import KvScales, Linear
from qtool.core.schemes import KvCacheScheme, LinearScheme
from qtool.errors import QtoolError, UsageError, nearest

if TYPE_CHECKING:
    from qtool.core.checkpoint import Checkpoint

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


class QuantizationFormat(Protocol):
    """Reads the quantized linears of one checkpoint."""

    kv_cache: KvLayout | None
    """How keys and values are to be stored between steps; None: as they come."""

    def __init__(self, checkpoint: "Checkpoint") -> None: ...

    def quantizes(self, module: str) -> bool:
        """Whether the linear layer `module` is stored quantized."""
        ...

    def scheme(self, module: str) -> LinearScheme:
        """What the quantized linear `module` computes with, known without reading it."""
        ...

    def shape(self, module: str) -> tuple[int, int]:
        """(N, K) of the quantized linear `module`, known without reading its codes."""
        ...

    def parts(self, module: str) -> tuple[str, ...]:
        """What `read` makes the quantized linear `module` of, each the name of a tensor beside its bias."""
        ...

    def read(self, module: str) -> Linear:
        """The quantized linear `module`, without its bias; QtoolError names what is wrong with it."""
        ...


class Writer(Protocol):
    """Writes a checkpoint's quantized linears in one format, exactly or not at all.

    It is told every linear before the first is written, since some formats know one scheme for all.
    """

    def __init__(
        self,
        schemes: Mapping[str, LinearScheme],
        shapes: Mapping[str, tuple[int, int]],
        dense: Sequence[str],
        kv_cache: KvCacheScheme | None,
    ) -> None:
        """`schemes` and `shapes` (N, K) of the quantized linears by name; the names of the `dense` ones.

        Raises UsageError naming the first linear that the format cannot hold, and why.
        """
        ...

    def encode(self, module: str, linear: Linear) -> dict[str, Tensor]:
        """The tensors that store a quantized linear, by full name; its bias is stored as ever."""
        ...

    def encode_kv(self, attention: str, scales: KvScales) -> dict[str, Tensor]:
        """The tensors that store the scales of one attention's keys and values."""
        ...

    def config(self) -> dict[str, Any]:
        """``quantization_config`` of config.json."""
        ...

    def files(self) -> dict[str, dict[str, Any]]:
        """JSON files that the format wants beside config.json, by name."""
        ...


def open_format(checkpoint: "Checkpoint") -> QuantizationFormat | None:
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


def find_writer(name: str) -> type[Writer]:
    """The writer of a format; UsageError lists the known ones."""
    if name not in WRITERS:
        raise UsageError(f"format {name!r} is not written; {nearest(name, WRITERS)}")
    writer: type[Writer] = _load(WRITERS[name])
    return writer


def _load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
