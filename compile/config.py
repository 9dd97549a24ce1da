"""What a decoder-only transformer is, read strictly from a Hugging Face config.json.

A family is a reading of the config, never a copy of the decoder.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qtool.compile.fields import Fields
from qtool.compile.layers import (
    Mixture,
    gemma_ropes,
    gemma_slides,
    qwen_windows,
    read_mixture,
    same_window,
)
from qtool.compile.rope import Rope, read_rope
from qtool.errors import QtoolError, nearest


@dataclass(frozen=True)
class DecoderConfig:
    """Everything about a model that changes the decoder's maths."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    """Positions that the model was made for."""
    rms_norm_eps: float
    activation: str
    attention_scale: float
    """What the products of queries and keys are multiplied by."""
    ropes: tuple[Rope, ...]
    """Of each layer."""
    windows: tuple[int | None, ...]
    """Of each layer: the last positions that a token attends to, its own included; None for all."""
    mixtures: tuple[Mixture | None, ...]
    """Of each layer: its experts; None for one MLP of `intermediate_size`."""
    tied: bool
    """The output head is the embedding table."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Queries and keys pass an RMS norm over each head before the rotary embedding."""
    post_norms: bool
    """What attention and MLP give passes an RMS norm of its own before it is added."""
    unit_offset_norms: bool
    """Norms multiply by 1 + weight."""
    embedding_scale: float

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.windows)


def read_config(config: Mapping[str, object], where: str) -> DecoderConfig:
    """Read the content of a config.json; `where` names the file in errors.

    Raises QtoolError for an architecture, a field or a value that is not supported.
    """
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise QtoolError(f"{where}: architectures is {names!r}, wanted a list of one name")
    architecture = str(names[0])
    if architecture not in FAMILIES:
        raise QtoolError(
            f"{where}: architecture {architecture!r} is not supported; {nearest(architecture, FAMILIES)} "
            f"(supported: {', '.join(sorted(FAMILIES))})"
        )
    fields = Fields(config, f"{where}: ")
    fields.only("model_type", MODEL_TYPES[architecture])
    decoder = FAMILIES[architecture](fields, architecture)
    fields.finish(_HARMLESS)
    return decoder


def _llama(fields: Fields, architecture: str) -> DecoderConfig:
    fields.only("rope_interleaved", False)
    bias = fields.flag("attention_bias", False)
    return _decoder(
        fields,
        architecture,
        num_kv_heads=fields.integer("num_key_value_heads", fields.integer("num_attention_heads")),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )


def _mistral(fields: Fields, architecture: str) -> DecoderConfig:
    return _decoder(fields, architecture, windows=same_window(fields, absent=4096))


def _qwen2(fields: Fields, architecture: str) -> DecoderConfig:
    return _decoder(fields, architecture, windows=qwen_windows(fields), qkv_bias=True)


def _qwen3(fields: Fields, architecture: str) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    return _decoder(
        fields,
        architecture,
        windows=qwen_windows(fields),
        head_dim=fields.integer("head_dim"),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


def _mixtral(fields: Fields, architecture: str) -> DecoderConfig:
    layers = fields.integer("num_hidden_layers")
    mixture = read_mixture(fields, "num_local_experts", "intermediate_size", normalized=True)
    return _decoder(
        fields,
        architecture,
        theta=1e6,
        windows=same_window(fields),
        mixtures=(mixture,) * layers,
    )


def _qwen3_moe(fields: Fields, architecture: str) -> DecoderConfig:
    fields.only("use_sliding_window", False)
    for name in ("sliding_window", "max_window_layers"):
        fields.has(name)  # of no effect without use_sliding_window
    if fields.has("num_experts") and fields.has("num_local_experts"):
        fields.only("num_local_experts", fields.integer("num_experts"))
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    normalized = fields.flag("norm_topk_prob", False)
    mixture = read_mixture(fields, name, "moe_intermediate_size", normalized)
    dense, step = fields.integers("mlp_only_layers"), fields.integer("decoder_sparse_step", 1)
    layers = range(fields.integer("num_hidden_layers"))
    bias = fields.flag("attention_bias", False)
    return _decoder(
        fields,
        architecture,
        mixtures=tuple(None if layer in dense or (layer + 1) % step else mixture for layer in layers),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


def _gemma3(fields: Fields, architecture: str) -> DecoderConfig:
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields.only(name, None)
    fields.only("use_bidirectional_attention", False)
    slides = gemma_slides(fields)
    window = fields.integer("sliding_window", 4096)
    head_dim, max_context = fields.integer("head_dim"), fields.integer("max_position_embeddings")
    local, full = gemma_ropes(fields, head_dim, max_context)
    bias = fields.flag("attention_bias", False)
    return _decoder(
        fields,
        architecture,
        activation="hidden_activation",
        head_dim=head_dim,
        attention_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        ropes=tuple(local if sliding else full for sliding in slides),
        windows=tuple(window if sliding else None for sliding in slides),
        tied=fields.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        post_norms=True,
        unit_offset_norms=True,
        embedding_scale=fields.integer("hidden_size") ** 0.5,
    )


def _phi3(fields: Fields, architecture: str) -> DecoderConfig:
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.only(name, False)
    for name in ("interpolate_factor", "full_attn_mod"):
        fields.only(name, 1)
    fields.assume("original_max_position_embeddings", 4096)
    fields.has("auto_map")  # code from before transformers had its own
    num_heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // num_heads)
    rope = read_rope(fields, head_dim, fields.integer("max_position_embeddings"), may_be_partial=True)
    return _decoder(
        fields,
        architecture,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        ropes=(rope,) * fields.integer("num_hidden_layers"),
        windows=same_window(fields),
    )


FAMILIES: dict[str, Callable[[Fields, str], DecoderConfig]] = {
    "Gemma3ForCausalLM": _gemma3,
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "MixtralForCausalLM": _mixtral,
    "Phi3ForCausalLM": _phi3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}


MODEL_TYPES = {
    "Gemma3ForCausalLM": "gemma3_text",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""What transformers goes by: it passes over ``architectures``."""


def _decoder(
    fields: Fields,
    architecture: str,
    *,
    activation: str = "hidden_act",
    theta: float = 10_000.0,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    attention_scale: float | None = None,
    ropes: tuple[Rope, ...] | None = None,
    windows: tuple[int | None, ...] | None = None,
    mixtures: tuple[Mixture | None, ...] | None = None,
    tied: bool | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    post_norms: bool = False,
    unit_offset_norms: bool = False,
    embedding_scale: float = 1.0,
) -> DecoderConfig:
    """The fields that every family has; a family passes those that it reads in its own way."""
    fields.only(activation, *_ACTIVATIONS)
    num_layers, hidden_size = fields.integer("num_hidden_layers"), fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = num_kv_heads or fields.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    head_dim = head_dim or fields.integer("head_dim", hidden_size // num_heads)
    if ropes is None:
        longest = fields.integer("max_position_embeddings")
        ropes = (read_rope(fields, head_dim, longest, theta=theta),) * num_layers
    max_context = min(rope.max_context for rope in ropes)
    windows = windows or (None,) * num_layers
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context=max_context,
        rms_norm_eps=fields.number("rms_norm_eps"),
        activation=fields.text(activation),
        attention_scale=attention_scale or head_dim**-0.5,
        ropes=ropes,
        windows=tuple(window if window and window < max_context else None for window in windows),
        mixtures=mixtures or (None,) * num_layers,
        tied=fields.flag("tie_word_embeddings", False) if tied is None else tied,
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        post_norms=post_norms,
        unit_offset_norms=unit_offset_norms,
        embedding_scale=embedding_scale,
    )


_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


_HARMLESS = frozenset(
    {
        "architectures",  # read before the family is known
        "quantization_config",  # read by the checkpoint, which refuses what it does not know
        "dtype",
        "torch_dtype",
        "transformers_version",
        "_name_or_path",
        "_model_name_or_path",
        "transformers.js_config",
        "is_llama_config",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "use_cache",
        "cache_implementation",
        "attention_dropout",  # of training, as the next four
        "embd_pdrop",
        "resid_pdrop",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "output_router_logits",
        "initializer_range",
        "pretraining_tp",  # another order of the same sums
    }
)
