"""AutoAWQ's GEMM layout: 4-bit codes, eight outputs a word, interleaved.

A linear ``m`` is ``m.qweight`` [K, N / 8] int32, ``m.qzeros`` [G, N / 8] int32 and ``m.scales`` [G, N]. Codes
and zero points are unsigned. What ``modules_to_not_convert`` names is stored dense.
"""

from typing import TYPE_CHECKING

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from torch import Tensor

from qtool.core.formats.parts import Parts
from qtool.core.qtensor import Linear, QuantizedTensor
from qtool.core.schemes import IntScheme, LinearScheme
from qtool.errors import QtoolError

if TYPE_CHECKING:
    from qtool.core.checkpoint import Checkpoint

_NUM_BITS, _PER_WORD = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of eight outputs lies: the 4 bits from bit 4 * place on."""


class AutoAwq:
    """Reads AutoAWQ's GEMM checkpoints."""

    kv_cache = None

    def __init__(self, checkpoint: "Checkpoint") -> None:
        self._checkpoint = checkpoint
        config = checkpoint.config["quantization_config"]
        where = f"{checkpoint.path / 'config.json'}: quantization_config"
        if (version := str(config.get("version", "gemm")).lower()) != "gemm":
            raise QtoolError(f"{where}.version is {version!r}, which is not supported; wanted 'gemm'")
        if (bits := config.get("bits", _NUM_BITS)) != _NUM_BITS:
            raise QtoolError(f"{where}.bits is {bits!r}; AutoAWQ's GEMM layout holds {_NUM_BITS}")
        group_size = config.get("group_size", 128)
        if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
            raise QtoolError(f"{where}.group_size is {group_size!r}, wanted a positive number or -1")
        self._scheme = IntScheme(
            _NUM_BITS, None if group_size == -1 else group_size, symmetric=not config.get("zero_point", True)
        )

    def quantizes(self, module: str) -> bool:
        """Whether any packed part of `module` is stored."""
        parts = Parts(self._checkpoint, module)
        return any(name in parts for name in ("qweight", "qzeros", "scales"))

    def scheme(self, module: str) -> LinearScheme:
        """One for all."""
        return LinearScheme(self._scheme)

    def read(self, module: str) -> Linear:
        """Unpack one linear."""
        parts, scheme = Parts(self._checkpoint, module), self._scheme
        in_features, words = parts.shape("qweight")
        size = scheme.group_size or in_features
        if in_features % size:
            raise parts.error("qweight", f"has {in_features} inputs, which groups of {size} do not divide")
        out_features, groups = words * _PER_WORD, in_features // size
        scale = parts.scale("scales", (groups, out_features))
        zero_point = None
        if not scheme.symmetric:
            zero_point = _unpack(parts.read("qzeros", torch.int32, (groups, words)))
        elif "qzeros" in parts:
            raise parts.error("qzeros", "is stored, though config.json says zero_point: false")
        codes = _unpack(parts.read("qweight", torch.int32, (in_features, words)))
        return Linear(QuantizedTensor(codes, scale.T.contiguous(), zero_point, scheme), None)


def _unpack(words: Tensor) -> Tensor:
    """Words [R, N / 8] as signed codes [N, R], unsigned ones less 8."""
    rows, columns = words.shape
    shape = torch.Size((rows, columns * _PER_WORD))
    codes: Tensor = unpack_from_int32(words, _NUM_BITS, shape)
    places = codes.view(rows, columns, _PER_WORD)
    return places[..., list(_PLACES)].reshape(shape).T.contiguous()
