import torch
from transformers import Gemma3TextConfig, LlamaConfig

from qtool.quantize.correction import OutputError, closing_linear, corrected
from tests.quantize.seen import statistics_of
from tests.quantize.test_folding import SHAPE, layer_of

NAMES = ["self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def test_the_closing_linear_is_the_one_that_the_residual_stream_gets() -> None:
    layer, update = layer_of(LlamaConfig(**SHAPE, num_key_value_heads=3, mlp_bias=True))
    assert closing_linear(layer, NAMES, update) == "mlp.down_proj"
    # What attention gives passes through the MLP as well.
    assert closing_linear(layer, NAMES[:3], update) is None
    assert all(not module._forward_hooks for module in layer.modules())


def test_a_norm_behind_it_makes_it_no_closing_linear() -> None:
    config = Gemma3TextConfig(**SHAPE, num_key_value_heads=1, layer_types=["full_attention"])
    layer, update = layer_of(config)
    assert closing_linear(layer, NAMES, update) is None


def test_a_linear_makes_up_for_what_its_inputs_tell_of_the_error() -> None:
    torch.manual_seed(0)
    x, lost = torch.randn(20_000, 24), torch.randn(5, 24)
    noise = torch.randn(20_000, 5)
    cross = (x @ lost.T + noise).T @ x / len(x)
    seen = statistics_of(x)
    weight = torch.randn(5, 24)
    found = corrected(weight, OutputError(seen, cross), damping=1e-6)
    # Noise of one over the root of 20,000 tokens.
    assert torch.allclose(found, weight + lost, atol=0.05)
