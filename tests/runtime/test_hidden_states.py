"""Hidden states of every engine, against transformers' own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.compile.build import compile_engine
from qtool.compile.engine import read_spec
from qtool.compile.hidden import HiddenStates, eagle3_layers, parse_layers
from qtool.errors import QtoolError, UsageError
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Floats, Step
from tests.compile.checkpoints import write_family
from tests.compile.steps import Chunk, difference, step_of

TOKENS = np.random.default_rng(3).integers(0, 101, 60).tolist()
OTHER = np.random.default_rng(4).integers(0, 101, 9).tolist()
BOUND = 1e-4
"""All engines here compute in float32; what is left is the order of the sums."""
LAYERS = "1,2,final"


def expected(model: Path, tokens: list[int]) -> Floats:
    """The residual stream that enters layers 1 and 2, and the final hidden states, [T, 3 · hidden]."""
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model
    with torch.inference_mode():
        found = decoder(torch.tensor([tokens]), output_hidden_states=True)
    states = [found.hidden_states[1], found.hidden_states[2], found.last_hidden_state]
    return torch.cat([state[0] for state in states], dim=1).numpy()


@pytest.fixture(params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_family(request.param, tmp_path / "model")


@pytest.fixture
def compiled(model: Path, tmp_path: Path) -> Callable[..., Path]:
    def build(target: str, hidden_states: str | None = LAYERS) -> Path:
        compile_engine(model, target, tmp_path / "engine", hidden_states=hidden_states)
        return tmp_path / "engine"

    return build


@pytest.mark.parametrize("target", ["reference", "openvino", "onnx"])
def test_hidden_states_are_transformers_own_in_a_ragged_chunked_step(
    target: str, model: Path, compiled: Callable[..., Path]
) -> None:
    engine = open_engine(compiled(target), kv_cache_tokens=400, threads=1)
    assert engine.hidden_states == HiddenStates(size=96, layers=(1, 2, "final"))
    wanted, other = expected(model, TOKENS), expected(model, OTHER)
    engine.run(step_of(Chunk(TOKENS[:37], 0, [3, 5])))
    step = step_of(Chunk(TOKENS[37:], 37, [3, 5]), Chunk(OTHER, 0, [1]), rows=[22, 31])
    rows = np.array([0, 5, 22, 24, 31], np.int32)
    result = engine.run_with_hidden(replace(step, hidden_rows=rows))
    assert difference(result.hidden, np.concatenate([wanted[[37, 42, 59]], other[[1, 8]]])) < BOUND
    assert difference(result.logits, engine.run(step)) < BOUND
    assert engine.run_with_hidden(step).hidden.shape == (0, 288)


@pytest.mark.parametrize("target", ["reference", "openvino", "onnx"])
def test_an_engine_without_hidden_states_refuses_the_wish_and_has_no_output_for_it(
    target: str, compiled: Callable[..., Path]
) -> None:
    folder = compiled(target, None)
    assert read_spec(folder).hidden_states is None
    engine = open_engine(folder, kv_cache_tokens=100, threads=1)
    step = step_of(Chunk(OTHER, 0, [1]))
    with pytest.raises(QtoolError, match="gives no hidden states; compile it with --hidden-states final"):
        engine.run_with_hidden(replace(step, hidden_rows=np.array([2], np.int32)))
    assert engine.run_with_hidden(step).hidden.shape[0] == 0


def test_a_checkpoint_gives_what_eagle_3_and_embeddings_read(model: Path) -> None:
    engine = open_engine(model, kv_cache_tokens=100)
    assert engine.hidden_states is not None
    assert engine.hidden_states.layers == (0, 1, 2, "final")
    step = replace(step_of(Chunk(TOKENS, 0, [1, 2])), hidden_rows=np.arange(60, dtype=np.int32))
    hidden = engine.run_with_hidden(step).hidden
    columns = [hidden[:, engine.hidden_states.columns(layer)] for layer in (1, 2, "final")]
    assert difference(np.concatenate(columns, axis=1), expected(model, TOKENS)) < BOUND


def test_layers_are_read_from_names_and_numbers_and_others_are_refused() -> None:
    assert eagle3_layers(30) == (2, 15, 27)
    assert parse_layers("eagle3,final,2", 30) == (2, 15, 27, "final")
    for text in ("", "last", "30", "-1", "2,,3"):
        with pytest.raises(UsageError, match="wanted final, eagle3 or layers 0 to 29"):
            parse_layers(text, 30)
    with pytest.raises(QtoolError, match="not of 4; compile it with --hidden-states 2,final,4"):
        HiddenStates(size=8, layers=(2, "final")).columns(4)


def test_a_step_that_wants_none_has_none_by_default() -> None:
    step: Step = step_of(Chunk(OTHER, 0, [1]))
    assert step.hidden_rows is None
