"""A Hugging Face checkpoint folder, read lazily: a tensor is loaded when it is asked for."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, bfloat16, float16, float32

from qtool.core.formats import open_format
from qtool.core.formats.contract import QuantizationFormat
from qtool.core.formats.promises import scaled
from qtool.core.kv_cache import KvCache
from qtool.core.qtensor import KvScales, Linear
from qtool.core.records import read_json
from qtool.core.schemes import KvCacheScheme, LinearScheme
from qtool.errors import QtoolError, UsageError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DENSE = (float16, bfloat16, float32)
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


class Checkpoint:
    """A folder with config.json and safetensors weights, single or sharded.

    Every shard's header is read and checked on opening (a truncated file is an error here, not later);
    the weights themselves stay on disk until `tensor` or `linear` asks for one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            what = "has no config.json" if path.is_dir() else "is not a folder"
            raise UsageError(f"{path}: {what}; wanted a Hugging Face checkpoint folder")
        self.config = read_json(path / "config.json")
        self._shards: dict[str, Any] = {}
        self._shard_of: dict[str, str] = {}
        for shard in self._shard_names():
            handle = self._open_shard(shard)
            self._shards[shard] = handle
            self._shard_of.update(dict.fromkeys(handle.keys(), shard))
        self._check_index()
        self.format: QuantizationFormat | None = open_format(self)

    def _shard_names(self) -> list[str]:
        single = (self.path / SINGLE).is_file()
        if (self.path / INDEX).is_file():
            shards = sorted(set(self._weight_map().values()))
            if single and shards != [SINGLE]:
                raise UsageError(
                    f"{self.path}: holds both {SINGLE} and {INDEX}, which may be two models; remove one"
                )
            return shards
        if single:
            return [SINGLE]
        gguf = next(self.path.glob("*.gguf"), None)
        advice = f"; name the file {gguf} instead" if gguf else ""
        raise UsageError(
            f"{self.path}: holds neither {SINGLE} nor {INDEX}, wanted safetensors weights{advice}"
        )

    def _weight_map(self) -> dict[str, str]:
        """The shard of each tensor, as the index says."""
        weight_map = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise QtoolError(f"{self.path / INDEX}: lacks a weight_map; fetch the checkpoint again")
        for name, shard in weight_map.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise QtoolError(f"{self.path / INDEX}: places {name} in {shard!r}, wanted a file name")
        return weight_map

    def _open_shard(self, shard: str) -> Any:
        file = self.path / shard
        if not file.is_file():
            raise QtoolError(f"{file}: is missing, though {INDEX} lists it; fetch the checkpoint again")
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise QtoolError(
                f"{file}: is truncated or no safetensors file ({error}); fetch the checkpoint again"
            ) from error

    def _check_index(self) -> None:
        if not (self.path / INDEX).is_file():
            return
        held = {shard: set(handle.keys()) for shard, handle in self._shards.items()}
        for name, shard in self._weight_map().items():
            if name not in held[shard]:
                raise QtoolError(f"{self.path / shard}: lacks tensor {name}, which {INDEX} places there")
            if self._shard_of[name] != shard:
                raise QtoolError(
                    f"{self.path / self._shard_of[name]}: holds {name}, which {INDEX} places in {shard}; "
                    "fetch the checkpoint again"
                )

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._shard_of)

    @property
    def files(self) -> list[Path]:
        """The files that make the model what it is: config, weights, tokenizer and templates."""
        names = ["config.json", *self._shards, *COMPANIONS]
        names += [INDEX] if (self.path / INDEX).is_file() else []
        return [self.path / name for name in sorted(names) if (self.path / name).is_file()]

    @property
    def architecture(self) -> str:
        """The model class that config.json names, such as ``LlamaForCausalLM``."""
        names = self.config.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise QtoolError(
                f"{self.path / 'config.json'}: architectures is {names!r}, wanted a list of one name"
            )
        return names[0]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a stored tensor, without reading it."""
        return tuple(self._handle(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype of a stored tensor as safetensors calls it, such as ``BF16``, without reading it."""
        return str(self._handle(name).get_slice(name).get_dtype())

    def num_bytes(self, name: str) -> int:
        """The bytes of a stored tensor, without reading it."""
        digits = re.search(r"\d+", self.dtype(name))
        return math.prod(self.shape(name)) * (int(digits[0]) if digits else 8) // 8

    def tensor(self, name: str) -> Tensor:
        """Read one stored tensor, in its stored dtype."""
        self._handle(name)  # which knows whether there is one
        # Opened anew, since a mapping keeps all that was ever read through it in memory: this one goes with
        # the tensor.
        with safe_open(self.path / self._shard_of[name], framework="pt") as shard:
            tensor: Tensor = shard.get_tensor(name)
        return tensor

    def dense(self, name: str) -> Tensor:
        """Read one stored tensor of plain numbers; QtoolError when its dtype is that of codes, or float64."""
        tensor = self.tensor(name)
        if tensor.dtype not in _DENSE:
            raise QtoolError(
                f"{self.path}: {name} holds {tensor.dtype}, but quantization_config in config.json does not "
                "say that it is quantized; wanted float16, bfloat16 or float32"
            )
        return tensor

    def linear(self, module: str) -> Linear:
        """Read the linear layer `module`, such as ``model.layers.0.mlp.up_proj``, dense or quantized."""
        bias = self.dense(f"{module}.bias") if f"{module}.bias" in self else None
        if self.format is not None and self.format.quantizes(module):
            return replace(self.format.read(module), bias=bias)
        return Linear(self.dense(f"{module}.weight"), bias)

    def schemes(self) -> dict[str, LinearScheme]:
        """What each quantized linear computes with, by its name, known without reading them."""
        if self.format is None:
            return {}
        return {
            module: self.format.scheme(module) for module in scaled(self) if self.format.quantizes(module)
        }

    @property
    def kv_cache(self) -> KvCacheScheme | None:
        """How keys and values are to be stored between steps; None: as they come."""
        layout = None if self.format is None else self.format.kv_cache
        return None if layout is None else layout.scheme

    def kv_scales(self, attention: str) -> KvScales:
        """The scales of an attention, such as ``model.layers.0.self_attn``, where there is a `kv_cache`."""
        layout = None if self.format is None else self.format.kv_cache
        if layout is None:
            raise QtoolError(f"{self.path}: config.json does not say that the KV cache is quantized")
        return layout.read(self, attention)

    def quantized_kv_cache(self, num_layers: int) -> KvCache | None:
        """The `kv_cache` with the scales of every layer."""
        if self.kv_cache is None:
            return None
        scales = [self.kv_scales(f"model.layers.{layer}.self_attn") for layer in range(num_layers)]
        return KvCache(self.kv_cache, scales)

    def _handle(self, name: str) -> Any:
        if name not in self._shard_of:
            raise QtoolError(
                f"{self.path}: holds no tensor {name}; is it a checkpoint of {self.architecture}?"
            )
        return self._shards[self._shard_of[name]]
