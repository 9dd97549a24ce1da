"""The linear that gives the logits, quantized: it lies behind the layers, and may be the embedding table."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qtool.calibrate.layers import LayerRunner, checkpoint_weights
from qtool.calibrate.statistics import Collector
from qtool.compile.build import compile_engine
from qtool.core.checkpoint import Checkpoint
from qtool.core.recipe import Recipe
from qtool.errors import UsageError
from qtool.quantize.convert import convert_checkpoint
from qtool.quantize.pipeline import quantize_checkpoint
from qtool.runtime.engines import open_engine
from tests.compile.steps import difference, in_chunks
from tests.quantize.test_pipeline import TEXT, contents, tokens

TOKENS = list(range(7, 30))


def recipe_of(folder: Path, weights: Any = None, method: str = "rtn", targets: str = "lm_head") -> Recipe:
    """Five windows of 24 tokens; 8 bits in groups of 32 unless `weights` says otherwise."""
    text = folder / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    weights = {"num_bits": 8, "group_size": 32} if weights is None else weights
    return Recipe.model_validate(
        {
            "calibration": {"dataset": str(text), "num_samples": 5, "seq_len": 24},
            "quantization": {
                "rules": [{"targets": [targets], "weights": weights, "method": method}],
                "keep": ["*.self_attn.*"],
            },
        }
    )


@pytest.fixture(scope="module")
def eight_bits(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    quantize_checkpoint(tiny, recipe_of(folder), folder / "out")
    return folder / "out"


@torch.no_grad()
def test_a_tied_head_gets_a_matrix_of_its_own_that_transformers_loads(tiny: Path, eight_bits: Path) -> None:
    source = Checkpoint(eight_bits)
    assert source.config["tie_word_embeddings"] is False
    before = load_file(tiny / "model.safetensors")
    assert torch.equal(source.tensor("model.embed_tokens.weight"), before["model.embed_tokens.weight"])
    manifest = json.loads((eight_bits / "qtool_manifest.json").read_text())
    assert manifest["untied_head"] is True
    assert list(manifest["linears"]) == ["lm_head"]
    assert manifest["linears"]["lm_head"]["tokens"] == 0  # rounding to nearest looks at none

    dense = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    hidden = dense.model(tokens()).last_hidden_state
    loaded = AutoModelForCausalLM.from_pretrained(eight_bits, dtype=torch.float32)
    wanted = hidden @ source.linear("lm_head").dense().T
    # The same float32 sums over weights that were unpacked by another library.
    assert torch.allclose(loaded(tokens()).logits, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(dense(tokens()).logits, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("target", ["openvino", "onnx"])
def test_every_backend_gives_the_logits_of_the_reference(
    eight_bits: Path, tmp_path: Path, target: str
) -> None:
    engine = tmp_path / "engine"
    compile_engine(eight_bits, target, engine)
    wanted, found = (
        in_chunks(open_engine(folder, kv_cache_tokens=320, threads=1), TOKENS, [9, 5], [3, 1])
        for folder in (eight_bits, engine)
    )
    assert difference(found, wanted) < 1e-4  # float32 sums in another order


def test_an_untied_head_is_a_linear_like_any_other(eight_bits: Path, tiny: Path, tmp_path: Path) -> None:
    untied = AutoModelForCausalLM.from_pretrained(tiny, tie_word_embeddings=False, dtype=torch.float32)
    with torch.no_grad():
        untied.lm_head.weight.copy_(untied.model.embed_tokens.weight.flip(0))
    untied.save_pretrained(tmp_path / "untied")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "untied" / name).write_bytes((tiny / name).read_bytes())
    manifest = quantize_checkpoint(tmp_path / "untied", recipe_of(tmp_path), tmp_path / "out")
    assert not manifest.untied_head
    ours, tied = (Checkpoint(folder).linear("lm_head").dense() for folder in (tmp_path / "out", eight_bits))
    assert torch.equal(ours.flip(0), tied)


@torch.no_grad()
def test_the_head_sees_what_the_last_norm_makes(tiny: Path) -> None:
    runner, windows = LayerRunner(Checkpoint(tiny)), tokens()
    hidden = runner.embed(windows)
    for index in range(len(runner)):
        with runner.layer(index, checkpoint_weights(runner.checkpoint)):
            runner.advance(index, hidden)
    collector = Collector()
    with collector.watching({"lm_head": runner.linears()["lm_head"]}):
        runner.run_head(windows, hidden)
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    wanted = model.model(windows).last_hidden_state.flatten(0, 1)
    seen = collector.statistics()["lm_head"]
    assert seen.tokens == windows.numel()
    assert torch.allclose(seen.second_moment, wanted.T @ wanted / len(wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["awq", "gptq", "best"])
def test_every_method_loses_no_more_than_rounding(tiny: Path, tmp_path: Path, method: str) -> None:
    recipe = recipe_of(tmp_path, {"group_size": 48, "symmetric": False}, method)
    record = quantize_checkpoint(tiny, recipe, tmp_path / "out").linears["lm_head"]
    assert record.sqnr_db > record.sqnr_rtn_db
    assert record.absorber is None


@pytest.mark.parametrize("weights", ["nvfp4", {"format": "fp8", "granularity": "tensor"}], ids=str)
def test_scales_of_the_whole_tensor_are_the_head_s_alone(tiny: Path, tmp_path: Path, weights: Any) -> None:
    recipe = recipe_of(tmp_path, weights, targets="*")
    assert quantize_checkpoint(tiny, recipe, tmp_path / "out").linears["lm_head"].sqnr_db > 15


def test_a_run_that_stops_before_the_head_resumes_and_ends_with_the_same_bytes(
    tiny: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, {"group_size": 32}, "gptq", targets="*")

    def stop(done: int, total: int, sqnr_db: float | None) -> None:
        assert total == 4
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(tiny, recipe, tmp_path / "stopped", progress=stop)
    quantize_checkpoint(tiny, recipe, tmp_path / "stopped")
    quantize_checkpoint(tiny, recipe, tmp_path / "straight")
    assert contents(tmp_path / "stopped") == contents(tmp_path / "straight")


def test_a_stored_copy_of_the_table_does_not_stay_beside_the_codes(tiny_copy: Path, tmp_path: Path) -> None:
    tensors = load_file(tiny_copy / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tiny_copy / "model.safetensors", {"format": "pt"})
    quantize_checkpoint(tiny_copy, recipe_of(tmp_path), tmp_path / "out")
    assert "lm_head.weight" not in Checkpoint(tmp_path / "out")


def test_other_formats_take_a_quantized_head_too(eight_bits: Path, tmp_path: Path) -> None:
    convert_checkpoint(eight_bits, tmp_path / "gptq", "gptq")
    assert Checkpoint(tmp_path / "gptq").config["quantization_config"]["lm_head"] is True
    ours, theirs = (
        Checkpoint(folder).linear("lm_head").dense() for folder in (eight_bits, tmp_path / "gptq")
    )
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("target", ["*.embed_tokens", "model.embed_tokens"])
def test_an_embedding_table_is_refused_and_the_error_says_why(
    tiny: Path, tmp_path: Path, target: str
) -> None:
    with pytest.raises(UsageError, match=r"is model\.embed_tokens, which stays in full precision.*lm_head"):
        quantize_checkpoint(tiny, recipe_of(tmp_path, targets=target), tmp_path / "out")
