"""NVIDIA ModelOpt's checkpoints: fp8 and nvfp4, described by ``hf_quant_config.json`` or by config.json.

A linear ``m`` is ``m.weight``, float8 codes [N, K] or fp4 ones two a byte [N, K / 2], and ``m.weight_scale``:
one number, one a channel [N], or nvfp4's [N, K / 16] in float8 times the number ``m.weight_scale_2``. Inputs
rounded by a calibrated range have ``m.input_scale``. A quantized KV cache has ``k_proj.k_scale`` and
``v_proj.v_scale``.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtool.core.activation import Activation
from qtool.core.formats.kv_cache import KvLayout
from qtool.core.formats.layouts import load_fp8, load_nvfp4
from qtool.core.formats.parts import Parts
from qtool.core.formats.promises import refuse_exempt, refuse_unknown
from qtool.core.formats.tensors import StoredModel
from qtool.core.qtensor import Linear
from qtool.core.records import read_json
from qtool.core.schemes import (
    NVFP4_ACTIVATIONS,
    ActivationScheme,
    Fp4Scheme,
    Fp8Scheme,
    KvCacheScheme,
    LinearScheme,
)
from qtool.errors import QtoolError

HF_QUANT_CONFIG = "hf_quant_config.json"
ALGORITHMS = {
    "FP8": LinearScheme(Fp8Scheme(None, None), ActivationScheme("fp8", dynamic=False)),
    "FP8_PER_CHANNEL_PER_TOKEN": LinearScheme(Fp8Scheme(1, None), ActivationScheme("fp8", dynamic=True)),
    "NVFP4": LinearScheme(Fp4Scheme("nvfp4"), NVFP4_ACTIVATIONS),
    "W4A16_NVFP4": LinearScheme(Fp4Scheme("nvfp4")),
}
"""What ModelOpt calls each scheme."""
KV_NAMES = ("k_proj.k_scale", "v_proj.v_scale")
_ONE = ((), (1,))
_READ = (
    "quant_method",
    "quant_algo",
    "quantized_layers",
    "group_size",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "exclude_modules",
    "ignore",
)
_PROVENANCE = ("config_groups", "producer")
"""``config_groups`` spells out what ``quant_algo`` names."""


class ModelOpt:
    """Reads ModelOpt's fp8 and nvfp4 checkpoints, of one algorithm or of one a linear."""

    def __init__(self, checkpoint: StoredModel) -> None:
        self._checkpoint = checkpoint
        self._where, said = _said(checkpoint)
        refuse_unknown(said, (*_READ, *_PROVENANCE), f"{self._where}: quantization")
        for field in ("exclude_modules", "ignore"):
            refuse_exempt(checkpoint, said.get(field) or (), f"{self._where}: {field}")
        self._algorithm = said.get("quant_algo")
        self._of_linear: Mapping[str, Any] = {}
        if self._algorithm == "MIXED_PRECISION":
            self._of_linear = said.get("quantized_layers") or {}
            for module, one in self._of_linear.items():
                where = f"quantized_layers.{module}"
                refuse_unknown(one, ("quant_algo", "group_size"), f"{self._where}: {where}")
                self._check_size(self._known(one.get("quant_algo"), f"{where}.quant_algo"), one)
        else:
            self._check_size(self._known(self._algorithm, "quant_algo"), said)
        self.kv_cache = self._kv_cache(said)

    def _known(self, algorithm: object, field: str) -> LinearScheme:
        if algorithm not in ALGORITHMS:
            raise QtoolError(
                f"{self._where}: {field} {algorithm!r} is not supported; wanted {', '.join(ALGORITHMS)} or "
                "MIXED_PRECISION of these"
            )
        return ALGORITHMS[str(algorithm)]

    def _check_size(self, scheme: LinearScheme, said: Mapping[str, Any]) -> None:
        wanted = scheme.weight.group_size if isinstance(scheme.weight, Fp4Scheme) else None
        if (size := said.get("group_size")) not in (None, wanted):
            raise QtoolError(f"{self._where}: group_size is {size!r}, wanted {wanted} for {scheme.weight}")

    def _kv_cache(self, said: Mapping[str, Any]) -> KvLayout | None:
        algorithm = said.get("kv_cache_quant_algo")
        if said.get("kv_cache_scheme"):  # what ModelOpt makes of FP8 in config.json
            algorithm = "FP8" if said["kv_cache_scheme"].get("type") == "float" else said["kv_cache_scheme"]
        if algorithm is None:
            return None
        if algorithm != "FP8":
            raise QtoolError(f"{self._where}: kv_cache_quant_algo {algorithm!r} is not supported; wanted FP8")
        return KvLayout(KvCacheScheme("fp8"), *KV_NAMES)

    def quantizes(self, module: str) -> bool:
        """Whether `module` has scales."""
        return "weight_scale" in Parts(self._checkpoint, module)

    def scheme(self, module: str) -> LinearScheme:
        """That of the checkpoint, or of the linear where each has its own."""
        if self._algorithm != "MIXED_PRECISION":
            return self._known(self._algorithm, "quant_algo")
        if module not in self._of_linear:
            raise QtoolError(f"{self._where}: quantized_layers lacks {module}, which has scales")
        return self._known(self._of_linear[module]["quant_algo"], module)

    def shape(self, module: str) -> tuple[int, int]:
        """From the codes' own."""
        out_features, size = Parts(self._checkpoint, module).shape("weight")
        return out_features, size * 2 if isinstance(self.scheme(module).weight, Fp4Scheme) else size

    def parts(self, module: str) -> tuple[str, ...]:
        """Those of its algorithm, and the scale of keys or values that a projection's outputs are."""
        scheme, names = self.scheme(module), ["weight", "weight_scale"]
        if isinstance(scheme.weight, Fp4Scheme):
            names.append("weight_scale_2")
        if _calibrated(scheme):
            names.append("input_scale")
        if self.kv_cache is not None:
            names += [name.rpartition(".")[2] for name in KV_NAMES if f".{name}".startswith(_end(module))]
        return tuple(names)

    def read(self, module: str) -> Linear:
        """Read one linear; QtoolError names the tensor that is missing or damaged."""
        parts, scheme = Parts(self._checkpoint, module), self.scheme(module)
        activation = None
        if scheme.activation is not None:
            scale = parts.scale("input_scale", *_ONE).item() if _calibrated(scheme) else None
            activation = Activation(scheme.activation, scale)
        if isinstance(scheme.weight, Fp8Scheme):
            return Linear(load_fp8(parts, scheme.weight, "weight_scale"), None, activation=activation)
        factor = parts.scale("weight_scale_2", *_ONE).double().reshape(1)
        return Linear(load_nvfp4(parts, "weight", factor), None, activation=activation)


def _calibrated(scheme: LinearScheme) -> bool:
    """Whether inputs are rounded by a stored range."""
    return scheme.activation is not None and scheme.activation.calibrated


def _end(module: str) -> str:
    return f".{module.rpartition('.')[2]}."


def _said(checkpoint: StoredModel) -> tuple[Path, dict[str, Any]]:
    """The file that says how the checkpoint is quantized, and what it says."""
    file = checkpoint.path / HF_QUANT_CONFIG
    if not file.is_file():
        return checkpoint.path / "config.json", checkpoint.config["quantization_config"]
    said = read_json(file).get("quantization")
    if not isinstance(said, dict):
        raise QtoolError(f"{file}: lacks quantization, wanted what ModelOpt writes there")
    beside = checkpoint.config.get("quantization_config") or {}
    refuse_unknown(beside, (*_READ, *_PROVENANCE), f"{checkpoint.path / 'config.json'}: quantization_config")
    for field in ("quant_algo", "quantized_layers", "group_size", "kv_cache_quant_algo"):
        if field in beside and beside[field] != said.get(field):
            raise QtoolError(
                f"{file}: {field} is {said.get(field)!r}, but {beside[field]!r} in quantization_config of "
                "config.json; fetch the checkpoint again"
            )
    if beside and bool(beside.get("kv_cache_scheme")) != bool(said.get("kv_cache_quant_algo")):
        raise QtoolError(
            f"{file}: kv_cache_quant_algo is {said.get('kv_cache_quant_algo')!r}, but kv_cache_scheme is "
            f"{beside.get('kv_cache_scheme')!r} in config.json; fetch the checkpoint again"
        )
    return file, {
        **said,
        "ignore": [*(beside.get("ignore") or ()), *(beside.get("exclude_modules") or ())],
    }
