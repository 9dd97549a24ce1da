import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from qtool.calibrate.layers import LayerRunner, checkpoint_weights
from qtool.core.checkpoint import Checkpoint
from qtool.errors import QtoolError, UsageError

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
}


def last_hidden(runner: LayerRunner, windows: Tensor) -> Tensor:
    hidden = runner.embed(windows)
    for index in range(len(runner)):
        with runner.layer(index, checkpoint_weights(runner.checkpoint)):
            runner.advance(index, hidden)
    return hidden


def expected_hidden(folder: Path, windows: Tensor) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(windows)
    return seen[0]


def windows_of(length: int) -> Tensor:
    return torch.randint(3, 320, (3, length), generator=torch.Generator().manual_seed(0))


def test_layers_one_by_one_make_what_the_whole_model_makes(tiny: Path) -> None:
    windows = windows_of(37)
    hidden = last_hidden(LayerRunner(Checkpoint(tiny)), windows)
    # One window at a time or three at once: the same sums in float32, in another order.
    assert torch.allclose(hidden, expected_hidden(tiny, windows), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**SHAPE),
        Qwen3Config(**SHAPE),
        Gemma3TextConfig(**SHAPE, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    ],
    ids=["qwen2", "qwen3", "gemma3"],
)
def test_other_families_run_by_their_own_modules(tmp_path: Path, config: PreTrainedConfig) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    windows = windows_of(29)
    hidden = last_hidden(LayerRunner(Checkpoint(tmp_path)), windows)
    assert torch.allclose(hidden, expected_hidden(tmp_path, windows), rtol=1e-4, atol=1e-4)


def test_a_layer_has_weights_only_inside_its_block(tiny: Path) -> None:
    runner = LayerRunner(Checkpoint(tiny))
    runner.embed(windows_of(8))
    with runner.layer(1, checkpoint_weights(runner.checkpoint)) as layer:
        loaded = {name for name, value in runner.model.named_parameters() if not value.is_meta}
        assert loaded == {f"model.layers.1.{name}" for name, _ in layer.named_parameters()}
        assert {value.dtype for value in layer.parameters()} == {torch.float32}
    assert all(value.is_meta for value in runner.model.parameters())


def test_changing_a_loaded_layer_leaves_the_checkpoint_alone(tiny: Path) -> None:
    runner = LayerRunner(Checkpoint(tiny))
    name = "model.layers.0.mlp.up_proj.weight"
    before = runner.checkpoint.tensor(name).clone()
    with runner.layer(0, checkpoint_weights(runner.checkpoint)) as layer, torch.no_grad():
        layer.get_parameter("mlp.up_proj.weight").zero_()
    assert torch.equal(runner.checkpoint.tensor(name), before)


def damage(folder: Path, name: str, value: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    if value is not None:
        tensors[name] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (None, "holds no tensor model.layers.2.mlp.up_proj.weight, which LlamaForCausalLM has"),
        (torch.zeros(96, 160), r"up_proj.weight: has shape \[96, 160\], wanted \[160, 96\]"),
        (torch.zeros(160, 96, dtype=torch.int32), "up_proj.weight: is stored as I32, wanted F16"),
        (torch.zeros(160, 96, dtype=torch.float64), "up_proj.weight: is stored as F64, wanted F16"),
        (torch.zeros(160, 96).to(torch.float8_e4m3fn), "up_proj.weight: is stored as F8_E4M3, wanted F16"),
    ],
)
def test_a_weight_that_does_not_fit_is_refused_by_name_before_any_work(
    tiny_copy: Path, value: Tensor | None, problem: str
) -> None:
    damage(tiny_copy, "model.layers.2.mlp.up_proj.weight", value)
    with pytest.raises(QtoolError, match=problem):
        LayerRunner(Checkpoint(tiny_copy))


def test_a_weight_that_is_no_number_is_an_error_that_names_it(tiny_copy: Path) -> None:
    damage(tiny_copy, "model.layers.2.mlp.up_proj.weight", torch.full((160, 96), torch.nan))
    runner, problem = LayerRunner(Checkpoint(tiny_copy)), "2.mlp.up_proj.weight: holds NaN or infinite"
    with pytest.raises(QtoolError, match=problem), runner.layer(2, checkpoint_weights(runner.checkpoint)):
        pass


def configure(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"num_hidden_layers": 2}, r"holds model\.layers\.2\.\S+, which LlamaForCausalLM does not have"),
        ({"num_hidden_layers": 4}, r"holds no tensor model\.layers\.3\.\S+, which LlamaForCausalLM has"),
        ({"tie_word_embeddings": False}, r"holds no tensor lm_head\.weight, which LlamaForCausalLM has"),
        ({"vocab_size": 321}, r"embed_tokens\.weight: has shape \[320, 96\], wanted \[321, 96\]"),
    ],
)
def test_a_config_of_another_model_than_the_stored_one_is_refused(
    tiny_copy: Path, values: dict[str, object], problem: str
) -> None:
    configure(tiny_copy, **values)
    with pytest.raises(QtoolError, match=problem):
        LayerRunner(Checkpoint(tiny_copy))


@pytest.mark.parametrize("architectures", [None, [], [3], "LlamaForCausalLM", ["A", "B"]])
def test_a_checkpoint_names_one_architecture(tiny_copy: Path, architectures: object) -> None:
    configure(tiny_copy, architectures=architectures)
    with pytest.raises(QtoolError, match=r"architectures is .*, wanted a list of one name"):
        LayerRunner(Checkpoint(tiny_copy))


@pytest.mark.parametrize("architecture", ["FooForCausalLM", "Qwen2ForCausalLM"])
def test_an_architecture_that_is_not_the_model_type_s_is_refused(tiny_copy: Path, architecture: str) -> None:
    configure(tiny_copy, architectures=[architecture])
    with pytest.raises(UsageError, match=f"names '{architecture}', but model_type 'llama' is .* LlamaFor"):
        LayerRunner(Checkpoint(tiny_copy))


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "llamma"},
        {"hidden_size": "96"},
        {"hidden_size": -96},
        {"num_attention_heads": 0},
        {"head_dim": 0},
        {"rms_norm_eps": None},
        {"max_position_embeddings": None},
        {"tie_word_embeddings": "yes"},
        {"dtype": "float7", "torch_dtype": "float7"},
        {"rope_parameters": "x"},
    ],
    ids=str,
)
def test_a_config_that_makes_no_decoder_is_refused_by_its_folder(
    tiny_copy: Path, values: dict[str, object]
) -> None:
    configure(tiny_copy, **values)
    with pytest.raises(UsageError, match="copy: transformers knows no such decoder"):
        LayerRunner(Checkpoint(tiny_copy))


def test_a_decoder_with_its_layers_elsewhere_is_an_error_that_names_it(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=320, n_embd=32, n_layer=1, n_head=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"GPT2LMHeadModel has no layers in model\.layers"):
        LayerRunner(Checkpoint(tmp_path))


def test_experts_that_are_stored_in_unknown_ways_are_refused_by_name(tmp_path: Path) -> None:
    config = OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"experts of model\.layers\.0\.mlp\.experts\.gate_up_proj in one"):
        LayerRunner(Checkpoint(tmp_path))
