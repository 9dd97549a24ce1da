"""What may differ from layer to layer, read from config.json: windows, rotary embeddings, experts."""

from dataclasses import dataclass

from qtool.compile.fields import Fields
from qtool.compile.rope import Rope, plain_rope, read_rope, read_rope_section


@dataclass(frozen=True)
class Mixture:
    """An MLP that is a mixture of experts, of which a router picks some for each token."""

    num_experts: int
    num_chosen: int
    """Experts of a token: those with the largest share in the softmax of the router's logits."""
    intermediate_size: int
    """Of each expert."""
    normalized: bool
    """The shares of the chosen are divided by their sum."""


def read_mixture(fields: Fields, num_experts: str, intermediate_size: str, normalized: bool) -> Mixture:
    """The experts of a layer, from the fields of the names given."""
    count, chosen = fields.integer(num_experts), fields.integer("num_experts_per_tok")
    if chosen > count:
        fields.refuse("num_experts_per_tok", f"at most {num_experts} ({count})")
    return Mixture(count, chosen, fields.integer(intermediate_size), normalized)


def same_window(fields: Fields, absent: int | None = None) -> tuple[int | None, ...]:
    """One window for all layers, if any; `absent` for a config without, where null means none."""
    return (fields.optional_integer("sliding_window", absent),) * fields.integer("num_hidden_layers")


def qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Qwen's layers from `max_window_layers` on slide when `use_sliding_window`; `layer_types` wins."""
    layers = fields.integer("num_hidden_layers")
    window, first = fields.optional_integer("sliding_window", 4096), fields.count("max_window_layers", 28)
    if not fields.flag("use_sliding_window", False):
        window = None
    slides = [layer >= first for layer in range(layers)]
    if fields.has("layer_types"):
        slides = _layer_types(fields, layers)
        if any(slides) and window is None:
            fields.refuse("layer_types", "full_attention alone, as use_sliding_window says")
    return tuple(window if sliding else None for sliding in slides)


def _layer_types(fields: Fields, layers: int) -> list[bool]:
    """Of each layer, whether it slides."""
    types = fields.texts("layer_types")
    known = {"full_attention", "sliding_attention"}
    if len(types) != layers or not known.issuperset(types):
        fields.refuse("layer_types", f"{layers} of {sorted(known)}")
    return [kind == "sliding_attention" for kind in types]


def gemma_slides(fields: Fields) -> list[bool]:
    """Of each layer, whether it slides: by `layer_types`, or all but every sixth or so."""
    layers = fields.integer("num_hidden_layers")
    fields.has("_sliding_window_pattern")  # which transformers writes and does not read
    pattern = fields.integer("sliding_window_pattern", 6)
    if fields.has("layer_types"):
        return _layer_types(fields, layers)
    return [(layer + 1) % pattern > 0 for layer in range(layers)]


def gemma_ropes(fields: Fields, head_dim: int, max_context: int) -> tuple[Rope, Rope]:
    """Of layers that slide and of those that don't."""
    if not fields.has("rope_parameters"):
        local = plain_rope(head_dim, max_context, fields.number("rope_local_base_freq", 10_000.0))
        return local, read_rope(fields, head_dim, max_context, theta=1e6)
    values = fields.section("rope_parameters")
    local, full = (
        read_rope_section(values.section(name), head_dim, max_context, theta)
        for name, theta in (("sliding_attention", 10_000.0), ("full_attention", 1e6))
    )
    values.finish(())
    return local, full
