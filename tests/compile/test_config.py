"""Reading config.json: known families, strictly."""

import json
import math
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qtool.compile.config import DecoderConfig, read_config
from qtool.compile.layers import Mixture
from qtool.compile.rope import plain_rope
from qtool.errors import QtoolError
from tests.compile.checkpoints import FAMILIES, LINEAR, LLAMA3, LONGROPE, YARN

CLASSES = {
    "gemma3_text": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
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


def _completed(family: str, config: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """`config` with transformers' own defaults in place of what it lacks."""
    read = type(FAMILIES[family]).from_dict(deepcopy(config)).to_dict()
    return {name: value for name, value in read.items() if name in whole}


def _read(config: dict[str, Any]) -> DecoderConfig | None:
    try:
        return read_config(config, "config.json")
    except QtoolError:
        return None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_field_that_is_absent_or_null_is_refused_or_means_what_it_does_to_transformers(family: str) -> None:
    whole = content(family, max_position_embeddings=8192)
    taken = []
    for name in whole.keys() - {"architectures", "model_type"}:
        for less in ({k: v for k, v in whole.items() if k != name}, {**whole, name: None}):
            found = _read(less)
            if found is None:
                continue
            try:
                completed = _completed(family, less, whole)
            except StrictDataclassError:  # null where transformers wants a value
                continue
            assert found == read_config(completed, "config.json"), (name, less.get(name, "absent"))
            taken.append(name)
    assert {"tie_word_embeddings", "rope_parameters"} <= set(taken)


def test_mistral_without_a_window_has_that_of_transformers_and_none_where_it_is_null() -> None:
    config = content("mistral", max_position_embeddings=8192)
    assert read_config({**config, "sliding_window": None}, "config.json").windows == (None,) * 3
    del config["sliding_window"]
    assert read_config(config, "config.json").windows == (4096,) * 3


def test_layers_of_a_mixture_model_have_experts_or_one_mlp() -> None:
    config = read_config(content("qwen3-moe"), "config.json")
    experts = Mixture(num_experts=7, num_chosen=3, intermediate_size=48, normalized=True)
    assert config.mixtures == (experts, None, experts)
    config = read_config(content("qwen3-moe", num_local_experts=None, num_experts=7), "config.json")
    assert config.mixtures == (experts, None, experts)
    config = read_config(content("qwen3-moe-sparse"), "config.json")
    assert config.mixtures == (None, Mixture(4, 2, 32, normalized=False), None)
    config = read_config(content("mixtral"), "config.json")
    assert config.mixtures == (Mixture(5, 2, 160, normalized=True),) * 3


def test_a_phi_engine_ends_where_longrope_would_change_its_factors() -> None:
    config = read_config(content("phi4-mini"), "config.json")
    short, plain = LONGROPE["short_factor"], plain_rope(16, 512, 1e4, dim=12)
    assert config.max_context == 160
    assert config.ropes[0].dim == 12
    assert config.ropes[0].radians == tuple(r / f for r, f in zip(plain.radians, short, strict=True))
    assert config.ropes[0].magnitude == pytest.approx((1 + math.log(512 / 160) / math.log(160)) ** 0.5)
    assert read_config(content("phi3"), "config.json").max_context == 512


def test_yarn_makes_the_context_longer() -> None:
    longer = content("qwen2-yarn", rope_parameters={**YARN, "factor": 20.0})
    assert read_config(longer, "config.json").max_context == 64 * 20


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert read_config(content("mistral", sliding_window=512), "config.json").windows == (None,) * 3


def test_an_older_checkpoint_writes_the_rope_in_two_fields() -> None:
    changes = {"rope_parameters": None, "rope_theta": 5e4}
    old = {**{name: value for name, value in LLAMA3.items() if name not in ("rope_theta", "rope_type")}}
    for kind in ("type", "rope_type"):
        config = read_config(
            content("llama3", **changes, rope_scaling={**old, kind: "llama3"}), "config.json"
        )
        assert config == read_config(content("llama3"), "config.json")
    config = read_config(content("llama", rope_parameters=None, rope_scaling=None), "config.json")
    assert config.ropes == (plain_rope(32, 512, 10_000.0),) * 3


@pytest.mark.parametrize(
    "parameters",
    [LINEAR, LLAMA3, YARN, {**YARN, "factor": 1.5, "beta_fast": 8.0, "truncate": False}],
    ids=["linear", "llama3", "yarn", "yarn-untruncated"],
)
def test_scaled_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(head_dim=64, rope_parameters=parameters, max_position_embeddings=512)
    wanted, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    rope = read_config(content("llama", head_dim=64, rope_parameters=parameters), "config.json").ropes[0]
    assert rope.magnitude == pytest.approx(factor)
    np.testing.assert_allclose(rope.frequencies(), wanted.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported.*LlamaForCausalLM.*Qwen3",
        ),
        ({"architectures": []}, "architectures is"),
        ({"model_type": "mistral"}, "model_type: is 'mistral', wanted 'llama'"),
        (
            {"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}},
            r"high_freq_factor: is 1.0, wanted more than low_freq_factor \(1\)",
        ),
        ({"rope_parameters": {**YARN, "rope_theta": 1.0}}, "rope_theta: is 1, wanted more than 1 for yarn"),
        ({"rope_parameters": {**LINEAR, "factor": math.inf}}, "factor: is inf, wanted a positive number"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: unknown field"),
        ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1.0}}, "rope_type 'ntk' is not supported"),
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
    every = content("qwen2-window", layer_types=None, max_window_layers=0)
    assert read_config(every, "config.json").windows == (40,) * 3
    with pytest.raises(QtoolError, match=r"layer_types: is .*wanted full_attention alone"):
        read_config(content("qwen2", layer_types=kinds), "config.json")
    with pytest.raises(QtoolError, match=r"layer_types: is .*wanted 3 of"):
        read_config(content("qwen2-window", layer_types=kinds[:2]), "config.json")


GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "cache_implementation": "hybrid",
    "final_logit_softcapping": None,
    "head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 96,
    "intermediate_size": 160,
    "max_position_embeddings": 512,
    "num_attention_heads": 6,
    "num_hidden_layers": 7,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 5e3,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 1e5,
    "sliding_window": 21,
    "sliding_window_pattern": 3,
    "vocab_size": 101,
}
"""The fields of the checkpoint on the hub, with small numbers."""


def test_gemma_layers_slide_by_a_pattern_and_have_a_rope_of_each_kind() -> None:
    config = read_config(GEMMA3_1B, "config.json")
    assert config.windows == (21, 21, None, 21, 21, None, 21)
    assert config.ropes[0] == plain_rope(32, 512, 5e3)
    assert config.ropes[2].radians == tuple(turn / 8 for turn in plain_rope(32, 512, 1e5).radians)
    unread = {**GEMMA3_1B, "layer_types": None, "_sliding_window_pattern": 2}
    assert read_config(unread, "config.json").windows == config.windows
    assert config.attention_scale == 24**-0.5
    assert config.embedding_scale == 96**0.5
    assert config.tied


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping: is 30.0, wanted None"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: is 50.0, wanted None"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention: is True"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation: is 'gelu', wanted 'silu' or 'gelu_py"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}, "layer_types: is .*wanted 3 of"),
        ("gemma3", {"rope_parameters": LINEAR}, "rope_parameters.factor: unknown field"),
        ("gemma3", {"rope_local_base_freq": 1e4}, "rope_local_base_freq: unknown field"),
        (
            "gemma3",
            {"rope_parameters": {"full_attention": {"rope_type": "proportional"}}},
            "rope_parameters.full_attention.rope_type 'proportional' is not supported",
        ),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias: is True, wanted False"),
        ("phi3", {"interpolate_factor": 2}, "interpolate_factor: is 2, wanted 1"),
        ("phi3", {"rope_scaling": {"type": "su"}}, "rope_scaling: is .*wanted rope_parameters alone"),
        ("phi3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: is 0.5, wanted 1.0, as rope_param"),
        ("phi3", {"num_experts": 4}, "num_experts: unknown field"),
        (
            "phi4-mini",
            {"rope_parameters": {**LONGROPE, "short_factor": [1.0, 2.0]}},
            r"short_factor: is \[1.0, 2.0\], wanted a list of 6 positive numbers",
        ),
        (
            "phi4-mini",
            {"rope_parameters": {**LONGROPE, "long_mscale": 1.2}},
            "rope_parameters.long_mscale: unknown field",
        ),
        (
            "phi4-mini",
            {"original_max_position_embeddings": 64},
            "original_max_position_embeddings: is 64, wanted 160.*, as rope_parameters says",
        ),
        ("mixtral", {"router_type": "sinkhorn"}, "router_type: unknown field"),
        ("mixtral", {"num_experts_per_tok": 6}, r"is 6, wanted at most num_local_experts \(5\)"),
        ("qwen3-moe", {"scoring_func": "sigmoid"}, "scoring_func: unknown field"),
        ("qwen3-moe", {"n_group": 2, "topk_group": 1}, "n_group: unknown field.*topk_group"),
        ("qwen3-moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size: unknown"),
        ("qwen3-moe", {"num_experts": 3}, "num_local_experts: is 7, wanted 3"),
        ("qwen3-moe", {"use_sliding_window": True}, "use_sliding_window: is True, wanted False"),
        ("qwen3-moe", {"mlp_only_layers": [0.5]}, r"mlp_only_layers: is \[0.5\], wanted a list of whole"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: is 0.5, wanted 1.0"),
        ("llama", {"attention_sinks": True}, "attention_sinks: unknown field"),
        ("mistral", {"attention_bias": True}, "attention_bias: unknown field"),
        ("qwen2", {"dual_chunk_attention_config": {}}, "dual_chunk_attention_config: unknown field"),
        ("qwen2-yarn", {"rope_parameters": {**YARN, "mscale": 2}}, "rope_parameters.mscale: unknown field"),
    ],
)
def test_what_would_change_the_maths_is_an_error_that_names_it(
    family: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(QtoolError, match=message):
        read_config(content(family, **changes), "config.json")


def test_the_fields_of_smollm2_are_all_known(smollm2: Path) -> None:
    config = read_config(json.loads((smollm2 / "config.json").read_text()), "config.json")
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.tied) == (30, 9, 3, True)
