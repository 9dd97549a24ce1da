"""What a format on disk is to the rest: a reader of quantized linears, and a writer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from qtool.core.formats.kv_cache import KvLayout
from qtool.core.formats.tensors import StoredModel
from qtool.core.qtensor import KvScales, Linear
from qtool.core.schemes import KvCacheScheme, LinearScheme


class QuantizationFormat(Protocol):
    """Reads the quantized linears of one checkpoint."""

    kv_cache: KvLayout | None
    """How keys and values are to be stored between steps; None: as they come."""

    def __init__(self, checkpoint: StoredModel) -> None: ...

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


@dataclass(frozen=True)
class Contents:
    """What a checkpoint is to hold, known before any of it is written."""

    schemes: Mapping[str, LinearScheme]
    """Of the quantized linears, by name."""
    shapes: Mapping[str, tuple[int, int]]
    """(N, K) of the same."""
    dense: Sequence[str]
    """Names of the other linears."""
    kv_cache: KvCacheScheme | None = None


class Writer(Protocol):
    """Writes a checkpoint's quantized linears in one format, exactly or not at all.

    It is told every linear before the first is written, since some formats know one scheme for all.
    """

    def __init__(self, contents: Contents) -> None:
        """Raises UsageError naming the first linear that the format cannot hold, and why."""
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
