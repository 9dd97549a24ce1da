"""What is said of a folder is what lies in it; what is predicted of a step is what its model costs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from qtool.compile.build import compile_engine
from qtool.compile.inspection import inspect
from qtool.compile.machine import measure
from qtool.compile.roofline import Machine, predict_step
from qtool.core.schemes import IntScheme
from qtool.errors import UsageError
from tests.compile.checkpoints import write_family, write_quantized

MACHINE = Machine(bandwidth=1e9, flops=1e12, measured=False)


def test_the_parts_of_a_checkpoint_are_its_bytes(tmp_path: Path) -> None:
    folder = write_family("llama-bias", tmp_path / "model", torch.bfloat16)
    found, _, weights = inspect(folder)
    tensors = load_file(folder / "model.safetensors")
    assert found.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert found.parts["head"] == found.parts["embeddings"] == weights.table == 101 * 96 * 2
    assert found.parts["norms"] == 7 * 96 * 2
    assert weights.table + weights.experts + weights.rest == found.weight_bytes
    assert (
        found.kv_bytes_per_token["f16"] == 3 * 2 * 16 * 2 * 2
    )  # layers, heads, head_dim, key and value, bytes


def test_linears_are_listed_with_the_bits_that_they_take(tiny: Path, tmp_path: Path) -> None:
    folder = write_quantized(tiny, tmp_path / "model", {"mlp": IntScheme(4, 32, False)}, torch.float16)
    rows = {row.name: row for row in inspect(folder)[0].linears}
    up = rows["model.layers.*.mlp.up_proj"]
    assert (up.count, up.out_features, up.in_features) == (3, 160, 96)
    assert up.scheme == "int4 asymmetric, group 32"
    # a scale of 16 bits and a zero point of 4 for 32 weights, and the shape, two int64
    assert up.bits == pytest.approx(4 + 20 / 32 + 128 / (160 * 96))
    assert rows["model.layers.*.self_attn.q_proj"].scheme == "F32"
    assert rows["model.layers.*.self_attn.q_proj"].bits == 32


@pytest.mark.parametrize("family", ["llama", "llama-bias", "qwen3", "phi3"])
def test_the_arithmetic_of_a_prefill_is_what_torch_counts(family: str, tmp_path: Path) -> None:
    folder = write_family(family, tmp_path / "model")
    _, config, weights = inspect(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        model(torch.zeros(3, 40, dtype=torch.long), logits_to_keep=1)
    step = predict_step(config, weights, 0, MACHINE, batch=3, past=0, new=40)
    # torch attends to masked positions too: twice the products of queries and keys, about
    masked = 3 * 40 * 4 * config.num_heads * config.head_dim * (40 - 41 / 2) * config.num_layers
    assert step.flops + masked == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_a_decode_step_moves_the_weights_and_the_context(tmp_path: Path) -> None:
    folder = write_family("mistral", tmp_path / "model")  # a window of 21
    found, config, weights = inspect(folder)
    kv_bytes = found.kv_bytes_per_token["f32"]
    one = predict_step(config, weights, kv_bytes, MACHINE, batch=1, past=10, new=1)
    assert one.bytes == found.weight_bytes - weights.table + 11 * kv_bytes
    many = predict_step(config, weights, kv_bytes, MACHINE, batch=4, past=500, new=1)
    assert many.bytes == found.weight_bytes - weights.table + 4 * 22 * kv_bytes
    assert many.memory_time == pytest.approx(many.bytes / 1e9)
    assert (one.bound, one.time) == ("memory", one.memory_time)


def test_a_small_step_reads_the_experts_that_it_needs(tmp_path: Path) -> None:
    folder = write_family("mixtral", tmp_path / "model")  # two of five experts
    found, config, weights = inspect(folder)
    assert weights.experts == found.parts["experts"] == 3 * 5 * 3 * 96 * 160 * 4
    one, many = (
        predict_step(config, weights, 0, MACHINE, batch=batch, past=0, new=1).bytes for batch in (1, 100)
    )
    assert one == pytest.approx(weights.rest + weights.experts * 2 / 5)
    assert many == pytest.approx(weights.rest + weights.experts)


def test_larger_steps_become_bound_by_arithmetic(tiny: Path) -> None:
    _, config, weights = inspect(tiny)
    machine = Machine(bandwidth=1e9, flops=1e10, measured=False)
    bounds = [
        predict_step(config, weights, 512, machine, batch=1, past=0, new=new).bound for new in (1, 4, 256)
    ]
    assert bounds == ["memory", "memory", "arithmetic"]
    unknown = Machine(bandwidth=1e9, flops=None, measured=False)
    assert predict_step(config, weights, 512, unknown, batch=1, past=0, new=1).bound is None


def test_an_engine_says_its_limits(tiny: Path, tmp_path: Path) -> None:
    spec = compile_engine(tiny, "openvino", tmp_path / "engine", kv_cache="u8")
    found, config, weights = inspect(tmp_path / "engine")
    assert (found.kind, found.engine) == ("engine for openvino", spec)
    assert found.kv_bytes_per_token == {"u8": spec.kv_bytes_per_token}
    assert weights.table == 320 * 96 * 4
    step = predict_step(config, weights, spec.kv_bytes_per_token, MACHINE, batch=1, past=0, new=1)
    assert step.bytes == spec.weight_bytes + spec.kv_bytes_per_token  # the table is the head as well


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds neither engine\.json nor config\.json"):
        inspect(tmp_path)


def test_this_machine_can_be_measured() -> None:
    machine = measure()
    assert machine.measured
    assert 1e8 < machine.bandwidth < 1e13
    assert machine.flops is not None
    assert 1e8 < machine.flops < 1e16
