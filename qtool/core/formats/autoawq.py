"""AutoAWQ's GEMM layout: 4-bit codes, eight outputs a word, interleaved.

A linear ``m`` is ``m.qweight`` [K, N / 8] int32, ``m.qzeros`` [G, N / 8] int32 and ``m.scales`` [G, N]. Codes
and zero points are unsigned. What ``modules_to_not_convert`` names is stored dense.
"""

from typing import Any

import torch
from torch import Tensor

from qtool.core.formats.contract import Contents
from qtool.core.formats.naming import brief, unquantized
from qtool.core.formats.parts import Parts
from qtool.core.formats.promises import refuse_dynamic, refuse_exempt, refuse_unknown
from qtool.core.formats.tensors import StoredModel
from qtool.core.formats.uniform import uniform
from qtool.core.formats.words import pack_to_int32, unpack_from_int32
from qtool.core.qtensor import KvScales, Linear, QuantizedTensor
from qtool.core.schemes import IntScheme, LinearScheme
from qtool.errors import QtoolError, UsageError

_NUM_BITS, _PER_WORD = 4, 8
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of eight outputs lies: the 4 bits from bit 4 * place on."""

_READ = ("quant_method", "version", "bits", "group_size", "zero_point", "modules_to_not_convert", "dynamic")
_PROVENANCE = ("backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "meta", "modules_to_fuse", "sym")
"""How the codes were chosen, or are to be run."""


class AutoAwq:
    """Reads AutoAWQ's GEMM checkpoints."""

    kv_cache = None

    def __init__(self, checkpoint: StoredModel) -> None:
        self._checkpoint = checkpoint
        config = checkpoint.config["quantization_config"]
        where = f"{checkpoint.path / 'config.json'}: quantization_config"
        for field, wanted in (("version", "gemm"), ("format", "gemm"), ("pack_dtype", "int32")):
            if (value := str(config.get(field, wanted)).lower()) != wanted:
                raise QtoolError(f"{where}.{field} is {value!r}, which is not supported; wanted {wanted!r}")
        refuse_dynamic(checkpoint, config.get("dynamic"), where)
        refuse_exempt(
            checkpoint, config.get("modules_to_not_convert") or (), f"{where}.modules_to_not_convert"
        )
        if (bits := config.get("bits", _NUM_BITS)) != _NUM_BITS:
            raise QtoolError(f"{where}.bits is {bits!r}; AutoAWQ's GEMM layout holds {_NUM_BITS}")
        group_size = config.get("group_size", 128)
        if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
            raise QtoolError(f"{where}.group_size is {group_size!r}, wanted a positive number or -1")
        refuse_unknown(config, (*_READ, *_PROVENANCE, "format", "pack_dtype"), where)
        self._scheme = IntScheme(
            _NUM_BITS, None if group_size == -1 else group_size, symmetric=not config.get("zero_point", True)
        )

    def quantizes(self, module: str) -> bool:
        """Whether any packed part of `module` is stored."""
        parts = Parts(self._checkpoint, module)
        return any(name in parts for name in self.parts(module))

    def scheme(self, module: str) -> LinearScheme:
        """One for all."""
        return LinearScheme(self._scheme)

    def shape(self, module: str) -> tuple[int, int]:
        """From the packed codes' own."""
        in_features, words = Parts(self._checkpoint, module).shape("qweight")
        return words * _PER_WORD, in_features

    def parts(self, module: str) -> tuple[str, ...]:
        """The same for all."""
        return "qweight", "qzeros", "scales"

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


class AutoAwqWriter:
    """Writes integers of 4 bits, all with zero points: the middle code stands for none.

    Linears with other groups than the rest are written in the largest groups that divide all.
    """

    def __init__(self, contents: Contents) -> None:
        self._scheme = uniform("awq", (_NUM_BITS,), contents)
        self._quantized, self._dense = list(contents.schemes), contents.dense
        for module, (out_features, _) in contents.shapes.items():
            if out_features % _PER_WORD:
                raise UsageError(
                    f"{module}: has {out_features} outputs; awq packs {_PER_WORD} of them a word and needs a "
                    "multiple of that"
                )

    def encode(self, module: str, linear: Linear) -> dict[str, Tensor]:
        """Raises UsageError for inputs in an order of their own."""
        if linear.order is not None:
            raise UsageError(
                f"{module}: has groups of inputs from anywhere (g_idx), which awq does not know; write it "
                "as gptq"
            )
        assert isinstance(linear.weight, QuantizedTensor)
        weight = self._scheme.regroup(linear.weight)
        zero_point = weight.zero_point
        return {
            f"{module}.qweight": _pack(weight.codes),
            f"{module}.qzeros": _pack(
                torch.zeros_like(weight.scale, dtype=torch.int8) if zero_point is None else zero_point
            ),
            f"{module}.scales": weight.scale.T.contiguous(),
        }

    def encode_kv(self, attention: str, scales: KvScales) -> dict[str, Tensor]:
        """Never asked for: a quantized KV cache is refused."""
        raise AssertionError(attention)

    def config(self) -> dict[str, Any]:
        """AutoAWQ's; it passes over a linear whose name holds one of ``modules_to_not_convert``.

        GPTQModel, which took AutoAWQ's place, asks ``dynamic`` instead.
        """
        names: list[str] = []
        dense = brief(self._dense, [*self._quantized, *self._dense])
        for parts in dense:
            name = parts[-1].removeprefix(".")
            if len(parts) > 1 and self._passes_over(name):
                names += [module for module in self._dense if module.endswith(parts[-1])]
            else:
                names.append(name)
        for name in names:
            if taken := self._passes_over(name):
                raise UsageError(
                    f"awq cannot leave {name} as it is without leaving {taken}, named like it, too"
                )
        return {
            "quant_method": "awq",
            "version": "gemm",
            "bits": _NUM_BITS,
            "group_size": self._scheme.group_size or -1,
            "zero_point": True,
            "modules_to_not_convert": names or None,
            "dynamic": unquantized(dense),
        }

    def _passes_over(self, name: str) -> str | None:
        """A quantized linear that `name` would make AutoAWQ pass over."""
        return next((module for module in self._quantized if name in module), None)

    def files(self) -> dict[str, dict[str, Any]]:
        """None."""
        return {}


def _pack(codes: Tensor) -> Tensor:
    """Signed codes [N, R] as words [R, N / 8], the inverse of `_unpack`."""
    outputs = codes.T.reshape(codes.shape[1], -1, _PER_WORD)
    places = torch.empty_like(outputs)
    places[..., list(_PLACES)] = outputs
    packed: Tensor = pack_to_int32(places.flatten(1), _NUM_BITS)
    return packed


def _unpack(words: Tensor) -> Tensor:
    """Words [R, N / 8] as signed codes [N, R], unsigned ones less 8."""
    rows, columns = words.shape
    shape = torch.Size((rows, columns * _PER_WORD))
    codes: Tensor = unpack_from_int32(words, _NUM_BITS, shape)
    places = codes.view(rows, columns, _PER_WORD)
    return places[..., list(_PLACES)].reshape(shape).T.contiguous()
