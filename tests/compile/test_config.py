"""Reading config.json: known families, strictly."""

import json
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qtool.compile.config import read_config
from qtool.compile.rope import Rope
from qtool.errors import QtoolError
from tests.compile.checkpoints import FAMILIES, LINEAR, LLAMA3

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def content(family: str, **changes: object) -> dict[str, Any]:
    """The config.json that transformers writes for a family, with changes."""
    config = deepcopy(FAMILIES[family])
    config.architectures = [CLASSES[config.model_type]]
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        return {**json.loads(Path(folder, "config.json").read_text()), **changes}


def test_a_family_is_a_reading_of_its_config() -> None:
    config = read_config(content("qwen3"), "config.json")
    assert (config.num_layers, config.head_dim, config.qk_norm, config.tied) == (3, 32, True, True)
    config = read_config(content("qwen2-window"), "config.json")
    assert (config.windows, config.qkv_bias, config.output_bias) == ((None, 40, 40), True, False)
    config = read_config(content("mistral"), "config.json")
    assert (config.windows, config.qkv_bias) == ((21, 21, 21), False)


def test_an_older_checkpoint_writes_the_rope_in_two_fields() -> None:
    changes = {"rope_parameters": None, "rope_theta": 5e4}
    old = {**{name: value for name, value in LLAMA3.items() if name not in ("rope_theta", "rope_type")}}
    for kind in ("type", "rope_type"):
        config = read_config(
            content("llama3", **changes, rope_scaling={**old, kind: "llama3"}), "config.json"
        )
        assert config == read_config(content("llama3"), "config.json")
    config = read_config(content("llama", rope_parameters=None, rope_scaling=None), "config.json")
    assert config.rope == Rope(10_000.0, 32)


@pytest.mark.parametrize("parameters", [LINEAR, LLAMA3], ids=["linear", "llama3"])
def test_scaled_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(head_dim=64, rope_parameters=parameters, max_position_embeddings=512)
    wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    rope = read_config(content("llama", head_dim=64, rope_parameters=parameters), "config.json").rope
    assert factor == 1.0
    np.testing.assert_allclose(rope.frequencies(), wanted.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported.*LlamaForCausalLM.*Qwen3",
        ),
        ({"architectures": []}, "architectures is"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: unknown field"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_theta": 1e4, "mscale": 2}}, "rope_parameters.mscale: unknown field"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_parameters.factor: is missing"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling: is .*wanted rope_parameters alone",
        ),
        ({"rope_theta": 5.0}, "rope_theta: is 5.0, wanted 10000.0"),
        ({"hidden_act": "gelu"}, "hidden_act: is 'gelu', wanted 'silu'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: is 0, wanted a positive whole number"),
        ({"vocab_size": None}, "vocab_size: is missing"),
        ({"num_key_value_heads": 4}, "num_key_value_heads: is 4, wanted a divisor"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: is 'yes', wanted true or false"),
        ({"rope_interleaved": True}, "rope_interleaved: is True, wanted False"),
    ],
)
def test_what_is_not_known_is_an_error_that_names_it(changes: dict[str, object], message: str) -> None:
    with pytest.raises(QtoolError, match=message):
        read_config(content("llama", **changes), "config.json")


def test_qwen_layer_types_have_to_agree_with_the_other_fields() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    config = read_config(content("qwen2-window", layer_types=kinds), "config.json")
    assert config.windows == (None, 40, None)
    with pytest.raises(QtoolError, match=r"layer_types: is .*wanted full_attention alone"):
        read_config(content("qwen2", layer_types=kinds), "config.json")
    with pytest.raises(QtoolError, match=r"layer_types: is .*wanted 3 of"):
        read_config(content("qwen2-window", layer_types=kinds[:2]), "config.json")


def test_the_fields_of_smollm2_are_all_known(smollm2: Path) -> None:
    config = read_config(json.loads((smollm2 / "config.json").read_text()), "config.json")
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.tied) == (30, 9, 3, True)
