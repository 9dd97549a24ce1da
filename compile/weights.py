"""A checkpoint's weights, held to what its config promises: no tensor unknown, missing or misshapen."""

import torch
from torch import Tensor

from qtool.compile.config import DecoderConfig
from qtool.compile.decoder import EMBEDDING, FINAL_NORM, HEAD, linear_shapes
from qtool.compile.layout import cut, places
from qtool.core.checkpoint import Checkpoint
from qtool.core.qtensor import Linear
from qtool.errors import QtoolError

_BUFFERS = "rotary_emb.inv_freq"
"""Older checkpoints store the frequencies that the config already gives."""


class CheckpointWeights:
    """The decoder's `Weights`, read lazily from a checkpoint that has been found to fit `config`.

    Raises QtoolError on opening when a stored tensor has no place in the decoder, and on reading when one
    is missing, has another shape than the config says, or holds what is no finite number.
    """

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._places = places(config)
        self._shapes = {
            self._places[name].module: (self._places[name].rows.stop, in_features)
            for name, (_, in_features) in linear_shapes(config).items()
        }
        self._norms = _norm_shapes(config)
        self._table = (config.vocab_size, config.hidden_size)
        self._config = config
        for name in checkpoint:
            self._check_known(name)
        if config.tied and f"{HEAD}.weight" in checkpoint:
            self._check_tied()

    def read_all(self) -> None:
        """Read every weight once and keep none: raises what reading it later would."""
        for name in (f"{EMBEDDING}.weight", *self._norms):
            self.tensor(name)
        for module in self._places:
            self.linear(module)

    def tensor(self, name: str) -> Tensor:
        """A stored tensor, in its stored dtype; the weight of a norm as what it multiplies by."""
        tensor = self._checkpoint.dense(name)
        wanted = self._table if name == f"{EMBEDDING}.weight" else (self._norms[name],)
        if tuple(tensor.shape) != wanted:
            raise QtoolError(
                f"{self._checkpoint.path}: {name} has shape {tuple(tensor.shape)}, config.json says {wanted}"
            )
        self._check_finite(name, tensor)
        return 1 + tensor.float() if self._config.unit_offset_norms and name in self._norms else tensor

    def linear(self, module: str) -> Linear:
        """A linear, dense or quantized."""
        place = self._places[module]
        if module == HEAD and not any(name.startswith(f"{HEAD}.") for name in self._checkpoint):
            raise QtoolError(
                f"{self._checkpoint.path}: holds no {HEAD}, though tie_word_embeddings is false or "
                f"absent in config.json; set it to true if the head is {EMBEDDING}.weight"
            )
        linear, shape = self._checkpoint.linear(place.module), self._shapes[place.module]
        if tuple(linear.weight.shape) != shape:
            raise QtoolError(
                f"{self._checkpoint.path}: {place.module} has shape {tuple(linear.weight.shape)}, "
                f"config.json says {shape}"
            )
        if (linear.bias is not None) != self._has_bias(module):
            raise QtoolError(
                f"{self._checkpoint.path}: {place.module} has {'a' if linear.bias is not None else 'no'} "
                "bias, config.json says otherwise"
            )
        for part, tensor in (("weight", linear.weight), ("bias", linear.bias)):
            if isinstance(tensor, Tensor):
                self._check_finite(f"{place.module}.{part}", tensor)
        return linear if len(place.rows) == shape[0] else cut(linear, place.rows)

    def _check_finite(self, name: str, tensor: Tensor) -> None:
        if not bool(tensor.isfinite().all()):
            raise QtoolError(
                f"{self._checkpoint.path}: {name} has values that are infinite or no numbers; the "
                "checkpoint is damaged, fetch it again"
            )

    def _has_bias(self, module: str) -> bool:
        if module.endswith(("q_proj", "k_proj", "v_proj")):
            return self._config.qkv_bias
        if module.endswith("o_proj"):
            return self._config.output_bias
        return self._config.mlp_bias and module != HEAD

    def _check_known(self, name: str) -> None:
        module, _, part = name.rpartition(".")
        known = name in self._norms or name == f"{EMBEDDING}.weight" or name.endswith(_BUFFERS)
        if module in self._shapes:
            quantized = self._checkpoint.format is not None and self._checkpoint.format.quantizes(module)
            known = quantized or part in ("weight", "bias")
        if not known and self._checkpoint.format is not None and self._checkpoint.format.kv_cache is not None:
            layout = self._checkpoint.format.kv_cache
            known = name.endswith((f".self_attn.{layout.key}", f".self_attn.{layout.value}"))
        if not known and not (self._config.tied and name == f"{HEAD}.weight"):
            raise QtoolError(
                f"{self._checkpoint.path}: holds tensor {name}, which has no place in "
                f"{self._config.architecture} as config.json describes it"
            )

    def _check_tied(self) -> None:
        table, head = (self._checkpoint.tensor(f"{module}.weight") for module in (EMBEDDING, HEAD))
        if not torch.equal(table, head):
            raise QtoolError(
                f"{self._checkpoint.path}: {HEAD}.weight differs from {EMBEDDING}.weight, though config.json "
                "says tie_word_embeddings; set it to false if the head is a matrix of its own"
            )


def _norm_shapes(config: DecoderConfig) -> dict[str, int]:
    layer = {"input_layernorm": config.hidden_size, "post_attention_layernorm": config.hidden_size}
    if config.post_norms:
        layer |= dict.fromkeys(
            ("pre_feedforward_layernorm", "post_feedforward_layernorm"), config.hidden_size
        )
    if config.qk_norm:
        layer |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), config.head_dim)
    shapes = {
        f"model.layers.{index}.{name}.weight": size
        for index in range(config.num_layers)
        for name, size in layer.items()
    }
    return {**shapes, f"{FINAL_NORM}.weight": config.hidden_size}
