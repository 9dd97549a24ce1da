"""What a decoder-only transformer is, read strictly from a Hugging Face config.json.

A family is a reading of the config, never a copy of the decoder.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qtool.compile.fields import Fields
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
    rope: Rope
    windows: tuple[int | None, ...]
    """Of each layer: the last positions that a token attends to, its own included; None for all."""
    tied: bool
    """The output head is the embedding table."""
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Queries and keys pass an RMS norm over each head before the rotary embedding."""

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
    window = fields.optional_integer("sliding_window")
    return _decoder(fields, architecture, windows=(window,) * fields.integer("num_hidden_layers"))


def _qwen2(fields: Fields, architecture: str) -> DecoderConfig:
    return _decoder(fields, architecture, windows=_qwen_windows(fields), qkv_bias=True)


def _qwen3(fields: Fields, architecture: str) -> DecoderConfig:
    bias = fields.flag("attention_bias", False)
    return _decoder(
        fields,
        architecture,
        windows=_qwen_windows(fields),
        head_dim=fields.integer("head_dim"),
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
    )


FAMILIES: dict[str, Callable[[Fields, str], DecoderConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def _decoder(
    fields: Fields,
    architecture: str,
    *,
    windows: tuple[int | None, ...] | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> DecoderConfig:
    """The fields that every family has; a family passes those that it reads in its own way."""
    fields.only("hidden_act", "silu")
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = num_kv_heads or fields.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        fields.refuse("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    head_dim = head_dim or fields.integer("head_dim", hidden_size // num_heads)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_context=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        activation=fields.text("hidden_act"),
        rope=read_rope(fields, head_dim),
        windows=windows or (None,) * fields.integer("num_hidden_layers"),
        tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Qwen's layers from `max_window_layers` on slide when `use_sliding_window`; `layer_types` wins."""
    layers = fields.integer("num_hidden_layers")
    window = fields.optional_integer("sliding_window")
    first = fields.optional_integer("max_window_layers")
    sliding = [False] * layers
    if fields.flag("use_sliding_window", False):
        if window is None or first is None:
            fields.refuse("use_sliding_window", "false without sliding_window and max_window_layers")
        sliding = [layer >= first for layer in range(layers)]
    if fields.has("layer_types"):
        types = fields.texts("layer_types")
        known = {"full_attention", "sliding_attention"}
        if len(types) != layers or not known.issuperset(types):
            fields.refuse("layer_types", f"{layers} of {sorted(known)}")
        if "sliding_attention" in types and not any(sliding):
            fields.refuse("layer_types", "full_attention alone, as use_sliding_window says")
        sliding = [kind == "sliding_attention" for kind in types]
    return tuple(window if slides else None for slides in sliding)


_HARMLESS = frozenset(
    {
        "architectures",  # read before the family is known
        "model_type",
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
        "attention_dropout",  # of training
        "initializer_range",
        "pretraining_tp",  # another order of the same sums
    }
)
