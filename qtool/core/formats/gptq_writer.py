"""Write the GPTQ layout, see `gptq`: version 1, which every engine reads, and version 2."""

from typing import Any

import torch
from torch import Tensor

from qtool.core.formats.contract import Contents
from qtool.core.formats.gptq import ADDED, NUM_BITS
from qtool.core.formats.naming import brief, unquantized
from qtool.core.formats.uniform import uniform
from qtool.core.formats.words import pack_to_int32
from qtool.core.qtensor import KvScales, Linear, QuantizedTensor
from qtool.errors import UsageError


class GptqWriter:
    """Writes integers of 2, 3, 4 or 8 bits, with the group of each input as ``g_idx``.

    Linears with other groups than the rest are written in the largest groups that divide all.
    """

    version = "gptq"

    def __init__(self, contents: Contents) -> None:
        self._scheme = uniform(self.version, NUM_BITS, contents)
        self._quantized, self._dense = list(contents.schemes), contents.dense
        self._reordered = False
        bits = self._scheme.num_bits
        for module, shape in contents.shapes.items():
            if any(size * bits % 32 for size in shape):
                raise UsageError(
                    f"{module}: has the shape {shape}; {self.version} packs codes of {bits} bits into whole "
                    "words of 32 along either"
                )

    def encode(self, module: str, linear: Linear) -> dict[str, Tensor]:
        """Codes in the order of the inputs. Raises UsageError for zero points that tools read differently."""
        assert isinstance(linear.weight, QuantizedTensor)
        weight, bits = self._scheme.regroup(linear.weight), self._scheme.num_bits
        in_features, groups = weight.shape[1], weight.scale.shape[1]
        group_of = torch.arange(in_features) // (in_features // groups)
        codes = weight.codes
        if linear.order is not None:
            self._reordered = True
            places = linear.order.argsort()
            codes, group_of = codes[:, places], group_of[places]
        zero_point = torch.zeros_like(weight.scale) if weight.zero_point is None else weight.zero_point
        stored = zero_point.short() - ADDED[self.version]
        if bool((stored < weight.scheme.low).any()):
            raise UsageError(
                f"{module}: has zero points of 0, which {self.version} stores as -1; tools borrow that from "
                "the zero point beside it, or do not; write it as gptq_v2"
            )
        return {
            f"{module}.qweight": pack_to_int32(codes.T.contiguous(), bits, packed_dim=0),
            f"{module}.qzeros": pack_to_int32(stored.to(torch.int8).T.contiguous(), bits),
            f"{module}.scales": weight.scale.T.contiguous(),
            f"{module}.g_idx": group_of.to(torch.int32),
        }

    def encode_kv(self, attention: str, scales: KvScales) -> dict[str, Tensor]:
        """Never asked for: a quantized KV cache is refused."""
        raise AssertionError(attention)

    def config(self) -> dict[str, Any]:
        """GPTQModel's, asked for when all is encoded; ``dynamic`` names the linears that stay as they are."""
        dense = brief(self._dense, [*self._quantized, *self._dense])
        return {
            "quant_method": "gptq",
            "checkpoint_format": self.version,
            "bits": self._scheme.num_bits,
            "group_size": self._scheme.group_size or -1,
            "sym": self._scheme.symmetric,
            "desc_act": self._reordered,
            "lm_head": "lm_head" in self._quantized,
            "pack_dtype": "int32",
            "dynamic": unquantized(dense),
        }

    def files(self) -> dict[str, dict[str, Any]]:
        """The same config, where AutoGPTQ looks for it."""
        return {"quantize_config.json": self.config()}


class GptqV2Writer(GptqWriter):
    """The same with zero points as they are, for engines that read version 2."""

    version = "gptq_v2"
