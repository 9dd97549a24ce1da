"""Tensors that do not fit the config are errors that name the tensor."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.compile.build import compile_engine
from qtool.compile.config import read_config
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.errors import QtoolError
from tests.compile.checkpoints import edit_config

LAYER = "model.layers.1"
TARGETS = ("reference", "openvino", "onnx")
Damage = Callable[[dict[str, Tensor]], object]


def read_everything(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    config = read_config(checkpoint.config, "config.json")
    weights = CheckpointWeights(config, checkpoint)
    weights.tensor(f"{LAYER}.input_layernorm.weight")
    weights.linear(f"{LAYER}.mlp.up_proj")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda t: t.update({f"{LAYER}.mlp.router.weight": torch.ones(2)}),
            "mlp.router.weight, which has no",
        ),
        (lambda t: t.update({f"{LAYER}.mlp.up_proj.bias": torch.ones(160)}), "up_proj has a bias"),
        (lambda t: t.update({f"{LAYER}.mlp.up_proj.lora": torch.ones(160)}), "up_proj.lora, which has no"),
        (lambda t: t.update({f"{LAYER}.mlp.up_proj.weight": torch.ones(2, 96)}), r"has shape \(2, 96\)"),
        (lambda t: t.update({f"{LAYER}.input_layernorm.weight": torch.ones(95)}), r"has shape \(95,\)"),
        (lambda t: t.pop(f"{LAYER}.mlp.up_proj.weight"), "holds no tensor model.layers.1.mlp.up_proj.weight"),
        (
            lambda t: t[f"{LAYER}.mlp.up_proj.weight"][3, 4].fill_(torch.nan),
            "up_proj.weight has values that are",
        ),
        (
            lambda t: t[f"{LAYER}.input_layernorm.weight"][3].fill_(torch.inf),
            "layernorm.weight has values that",
        ),
        (lambda t: t.update({"lm_head.weight": torch.ones(320, 96)}), "lm_head.weight differs"),
        (lambda t: t.update({"lm_head.weight_packed": torch.ones(3)}), "lm_head.weight_packed, which has no"),
    ],
)
def test_a_tensor_without_its_place_is_named(tiny_copy: Path, damage: Damage, message: str) -> None:
    tensors = load_file(tiny_copy / "model.safetensors")
    damage(tensors)
    save_file(tensors, tiny_copy / "model.safetensors")
    with pytest.raises(QtoolError, match=message):
        read_everything(tiny_copy)


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_reads_every_weight_when_it_compiles(
    target: str, tiny_copy: Path, tmp_path: Path
) -> None:
    tensors = load_file(tiny_copy / "model.safetensors")
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, tiny_copy / "model.safetensors")
    with pytest.raises(QtoolError, match=r"holds no tensor model\.layers\.2\.mlp\.down_proj\.weight"):
        compile_engine(tiny_copy, target, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_a_head_that_is_missing_may_be_meant_as_tied(tiny_copy: Path) -> None:
    edit_config(tiny_copy, tie_word_embeddings=False)
    checkpoint = Checkpoint(tiny_copy)
    weights = CheckpointWeights(read_config(checkpoint.config, "config.json"), checkpoint)
    with pytest.raises(QtoolError, match=r"holds no lm_head, though tie_word_embeddings is false"):
        weights.read_all()


def test_a_tied_head_may_be_stored_twice_and_frequencies_once_more(tiny_copy: Path) -> None:
    tensors = load_file(tiny_copy / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{LAYER}.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    save_file(tensors, tiny_copy / "model.safetensors")
    read_everything(tiny_copy)
