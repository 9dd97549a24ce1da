"""Write checkpoints as NVIDIA ModelOpt exports them, see `modelopt`."""

from typing import Any

import torch
from torch import Tensor

from qtool.core.formats.contract import Contents
from qtool.core.formats.kv_cache import KvLayout
from qtool.core.formats.modelopt import ALGORITHMS, HF_QUANT_CONFIG, KV_NAMES
from qtool.core.formats.naming import brief
from qtool.core.fp4 import pack_fp4
from qtool.core.qtensor import Fp4Tensor, Fp8Tensor, KvScales, Linear
from qtool.core.schemes import Fp4Scheme, KvCacheScheme, LinearScheme
from qtool.errors import UsageError

_NAMES = {scheme: name for name, scheme in ALGORITHMS.items()}
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}
"""Whose conventions these are: engines ask for the name, and for the version of nvfp4's scales."""


class ModelOptWriter:
    """Writes the schemes that ModelOpt has a name for; nvfp4's global scale in float32, as it does."""

    def __init__(self, contents: Contents) -> None:
        schemes, kv_cache = contents.schemes, contents.kv_cache
        if kv_cache not in (None, KvCacheScheme("fp8")):
            raise UsageError(f"modelopt holds an fp8 KV cache with a scale a layer, not an {kv_cache}")
        for module, scheme in schemes.items():
            if scheme not in _NAMES:
                held = "; ".join(map(str, _NAMES))
                raise UsageError(f"{module}: is quantized as {scheme}; modelopt holds {held}")
        self._schemes, self._dense, self._kv_cache = schemes, contents.dense, kv_cache

    def encode(self, module: str, linear: Linear) -> dict[str, Tensor]:
        """Scales of the whole tensor are single numbers in float32."""
        weight, activation = linear.weight, linear.activation
        if isinstance(weight, Fp8Tensor):
            one = weight.scale.numel() == 1
            scale = weight.scale.float().reshape(()) if one else weight.scale.reshape(-1)
            tensors = {"weight": weight.codes, "weight_scale": scale}
        else:
            assert isinstance(weight, Fp4Tensor)
            assert weight.global_scale is not None
            tensors = {
                "weight": pack_fp4(weight.codes),
                "weight_scale": weight.scale,
                "weight_scale_2": weight.global_scale.float().reshape(()),
            }
        if activation is not None and activation.scale is not None:
            tensors["input_scale"] = torch.tensor(activation.scale, dtype=torch.float32)
        return {f"{module}.{name}": tensor.contiguous() for name, tensor in tensors.items()}

    def encode_kv(self, attention: str, scales: KvScales) -> dict[str, Tensor]:
        """Beside the projections of the keys and of the values."""
        assert self._kv_cache is not None
        return KvLayout(self._kv_cache, *KV_NAMES).store(attention, scales)

    def config(self) -> dict[str, Any]:
        """What ModelOpt writes into config.json: the same as in its own file, flat."""
        quantization = self._quantization()
        kv_cache = {"dynamic": False, "num_bits": 8, "type": "float"} if self._kv_cache else None
        return {
            "quant_method": "modelopt",
            "quant_algo": quantization["quant_algo"],
            "producer": _PRODUCER,
            "ignore": quantization["exclude_modules"],
            **({"kv_cache_scheme": kv_cache} if kv_cache else {}),
            **{key: quantization[key] for key in ("group_size", "quantized_layers") if key in quantization},
        }

    def files(self) -> dict[str, dict[str, Any]]:
        """hf_quant_config.json, which TensorRT-LLM and older engines read."""
        return {HF_QUANT_CONFIG: {"producer": _PRODUCER, "quantization": self._quantization()}}

    def _quantization(self) -> dict[str, Any]:
        algorithms = {module: _algorithm(scheme) for module, scheme in self._schemes.items()}
        excluded = ["*".join(parts) for parts in brief(self._dense, [*self._schemes, *self._dense])]
        quantization: dict[str, Any] = {
            "kv_cache_quant_algo": "FP8" if self._kv_cache else None,
            "exclude_modules": excluded,
        }
        first, *others = algorithms.values()
        if all(other == first for other in others):
            return {**first, **quantization}
        return {"quant_algo": "MIXED_PRECISION", **quantization, "quantized_layers": algorithms}


def _algorithm(scheme: LinearScheme) -> dict[str, Any]:
    block = scheme.weight.group_size if isinstance(scheme.weight, Fp4Scheme) else None
    return {"quant_algo": _NAMES[scheme], **({} if block is None else {"group_size": block})}
