"""fp8 in blocks of outputs and inputs, as DeepSeek-V3 brought it: transformers' ``quant_method: fp8``.

A linear ``m`` is ``m.weight`` [N, K] float8 with ``m.weight_scale_inv`` [blocks of N, blocks of K], by which
codes are multiplied in spite of its name. Inputs are rounded to fp8 too, each token's by groups as long as a
block.
"""

from typing import Any

import torch
from torch import Tensor

from qtool.core.activation import Activation
from qtool.core.formats.contract import Contents
from qtool.core.formats.layouts import load_fp8
from qtool.core.formats.parts import Parts
from qtool.core.formats.promises import refuse_exempt, refuse_unknown
from qtool.core.formats.tensors import StoredModel
from qtool.core.qtensor import Fp8Tensor, KvScales, Linear
from qtool.core.schemes import ActivationScheme, Fp8Scheme, LinearScheme
from qtool.errors import QtoolError, UsageError

_SCALE = "weight_scale_inv"
_READ = (
    "quant_method",
    "weight_block_size",
    "activation_scheme",
    "fmt",
    "expert_dtype",
    "modules_to_not_convert",
)
_PROVENANCE = ("dequantize", "scale_fmt")  # the scales' own dtype tells their format


class BlockFp8:
    """Reads fp8 checkpoints with scales in blocks."""

    kv_cache = None

    def __init__(self, checkpoint: StoredModel) -> None:
        self._checkpoint = checkpoint
        config = checkpoint.config["quantization_config"]
        where = f"{checkpoint.path / 'config.json'}: quantization_config"
        refuse_unknown(config, (*_READ, *_PROVENANCE), where)
        refuse_exempt(
            checkpoint, config.get("modules_to_not_convert") or (), f"{where}.modules_to_not_convert"
        )
        block = config.get("weight_block_size")
        if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) for n in block):
            raise QtoolError(f"{where}.weight_block_size is {block!r}, wanted two numbers such as [128, 128]")
        for field, wanted in (("activation_scheme", "dynamic"), ("fmt", "e4m3"), ("expert_dtype", "fp8")):
            if config.get(field, wanted) != wanted:
                raise QtoolError(
                    f"{where}.{field} is {config[field]!r}, which is not supported; wanted {wanted}"
                )
        self._weight, self._inputs = Fp8Scheme(*block), _activations(block[1])

    def quantizes(self, module: str) -> bool:
        """Whether `module` has scales."""
        return _SCALE in Parts(self._checkpoint, module)

    def scheme(self, module: str) -> LinearScheme:
        """One for all."""
        return LinearScheme(self._weight, self._inputs)

    def shape(self, module: str) -> tuple[int, int]:
        """As stored."""
        return Parts(self._checkpoint, module).shape("weight")

    def parts(self, module: str) -> tuple[str, ...]:
        """The same for all."""
        return "weight", _SCALE

    def read(self, module: str) -> Linear:
        """Read one linear; QtoolError names the tensor that is missing or damaged."""
        parts, size = Parts(self._checkpoint, module), self._weight.columns
        weight = load_fp8(parts, self._weight, _SCALE)
        if size is not None and weight.shape[1] % size:
            raise parts.error("weight", f"has {weight.shape[1]} inputs, which groups of {size} do not divide")
        if weight.scale.dtype == torch.float8_e8m0fnu:  # DeepSeek-V3.1 and later: powers of two
            weight = Fp8Tensor(weight.codes, weight.scale.float(), weight.scheme)
        return Linear(weight, None, activation=Activation(self._inputs))


class BlockFp8Writer:
    """Writes fp8 in blocks whose inputs are rounded in groups as long as a block."""

    def __init__(self, contents: Contents) -> None:
        schemes = contents.schemes
        if contents.kv_cache is not None:
            raise UsageError("fp8 knows no quantized KV cache; write it as compressed-tensors")
        first = next(iter(schemes.values())).weight
        for module, scheme in schemes.items():
            block = scheme.weight
            if not isinstance(block, Fp8Scheme) or not block.columns or block.rows in (None, 1):
                raise UsageError(f"{module}: is quantized as {scheme}; fp8 holds blocks, such as 128x128")
            if scheme.activation != _activations(block.columns):
                raise UsageError(
                    f"{module}: has {scheme.activation or 'inputs as they are'}; engines of fp8 round them "
                    f"to fp8 in groups of {block.columns}, so quantize it with activations: "
                    f"{{format: fp8, group_size: {block.columns}}}"
                )
            if block != first:
                raise UsageError(
                    f"{module}: is quantized as {block}, others as {first}; fp8 holds one of them"
                )
        assert isinstance(first, Fp8Scheme)
        self._block, self._dense = [first.rows, first.columns], contents.dense

    def encode(self, module: str, linear: Linear) -> dict[str, Tensor]:
        """Scales in float32, as engines want them."""
        assert isinstance(linear.weight, Fp8Tensor)
        return {
            f"{module}.weight": linear.weight.codes,
            f"{module}.{_SCALE}": linear.weight.scale.float().contiguous(),
        }

    def encode_kv(self, attention: str, scales: KvScales) -> dict[str, Tensor]:
        """Never asked for: a quantized KV cache is refused."""
        raise AssertionError(attention)

    def config(self) -> dict[str, Any]:
        """As DeepSeek-V3's."""
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": self._block,
            "modules_to_not_convert": list(self._dense) or None,
        }

    def files(self) -> dict[str, dict[str, Any]]:
        """None."""
        return {}


def _activations(group_size: int) -> ActivationScheme:
    return ActivationScheme("fp8", dynamic=True, group_size=group_size)
