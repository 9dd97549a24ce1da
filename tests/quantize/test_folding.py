from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
)

from qtool.quantize.folding import Absorber, absorbers, fold

SHAPE = {
    "vocab_size": 40,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "head_dim": 32,
}


def layer_of(config: PreTrainedConfig) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The seeded first layer of a model, and what it adds to seven tokens."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 + (0.7 if parameter.dim() == 1 else 0)
    layer: nn.Module = model.model.layers[0]
    calls: list[tuple[tuple[Tensor, ...], dict[str, object]]] = []
    hook = layer.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    with torch.no_grad():
        model(torch.arange(7)[None], use_cache=False)
    hook.remove()
    ((hidden,), kwargs) = calls[0]

    @torch.no_grad()
    def update() -> Tensor:
        output: Tensor = layer(hidden, **kwargs)
        return output[0] - hidden[0]

    return layer, update


def sources(found: list[Absorber]) -> list[str]:
    return [absorber.source for absorber in found]


def test_every_absorber_leaves_the_function_unchanged() -> None:
    layer, update = layer_of(LlamaConfig(**SHAPE, num_key_value_heads=3, mlp_bias=True, attention_bias=True))
    found = absorbers(layer, update)
    assert sources(found) == [
        "input_layernorm",
        "self_attn.v_proj",
        "post_attention_layernorm",
        "mlp.up_proj",
    ]
    before, weights = update(), {name: value.clone() for name, value in layer.state_dict().items()}
    for absorber in found:
        size = len(layer.get_parameter(f"{absorber.source}.weight"))
        fold(layer, absorber, torch.rand(size) * 3 + 0.1)
        assert not torch.equal(
            layer.get_parameter(f"{absorber.source}.weight"), weights[f"{absorber.source}.weight"]
        )
    assert torch.allclose(update(), before, rtol=1e-4, atol=1e-5)


def test_looking_for_absorbers_leaves_the_weights_bit_by_bit() -> None:
    layer, update = layer_of(LlamaConfig(**SHAPE, num_key_value_heads=3))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    absorbers(layer, update)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_grouped_query_attention_has_no_absorber_for_the_output_projection() -> None:
    layer, update = layer_of(LlamaConfig(**SHAPE, num_key_value_heads=1))
    assert "self_attn.v_proj" not in sources(absorbers(layer, update))


def test_linears_that_are_one_share_the_absorber_of_their_parts() -> None:
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    layer, update = layer_of(Phi3Config(**shape, num_key_value_heads=1, pad_token_id=0, eos_token_id=2))
    assert sources(absorbers(layer, update)) == ["input_layernorm", "post_attention_layernorm"]


def test_a_norm_that_stands_for_one_plus_its_weight_or_sits_elsewhere_is_no_absorber() -> None:
    config = Gemma3TextConfig(**SHAPE, num_key_value_heads=1, layer_types=["full_attention"])
    layer, update = layer_of(config)
    assert sources(absorbers(layer, update)) == ["mlp.up_proj"]


def test_a_norm_with_readers_beyond_the_usual_ones_is_no_absorber() -> None:
    shape = {name: value for name, value in SHAPE.items() if name != "head_dim"}
    layer, update = layer_of(CohereConfig(**shape, num_key_value_heads=1, pad_token_id=0))
    assert "post_attention_layernorm" not in dict(layer.named_modules())
    assert sources(absorbers(layer, update)) == ["mlp.up_proj"]


@pytest.mark.parametrize("missing", ["up_proj", "down_proj"])
def test_a_layer_without_the_usual_names_has_fewer_absorbers(missing: str) -> None:
    layer, update = layer_of(LlamaConfig(**SHAPE, num_key_value_heads=1))
    mlp = layer.get_submodule("mlp")
    original = mlp.get_submodule(missing)
    delattr(mlp, missing)
    mlp.renamed = original
    mlp.forward = lambda x: x
    assert "mlp.up_proj" not in sources(absorbers(layer, update))
