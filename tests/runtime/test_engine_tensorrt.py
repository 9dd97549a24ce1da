"""The TensorRT driver, whole, over a stand-in for plan and GPU; the plan itself is built for real."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from openai import OpenAI
from transformers import LlamaConfig

from qtool.compile.backends.onnx import write_onnx
from qtool.compile.backends.tensorrt.info import read_info
from qtool.compile.backends.tensorrt.zero_points import fold_zero_points
from qtool.compile.build import compile_engine
from qtool.compile.config import read_config
from qtool.compile.engine import read_spec
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.core.recipe import TensorRtOptions
from qtool.core.schemes import IntScheme
from qtool.errors import QtoolError, UsageError
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Engine, Step, slots_of
from qtool.runtime.tokenizer import Tokenizer
from tests.compile.checkpoints import SHAPE, write_family, write_model, write_quantized
from tests.compile.steps import Chunk, difference, in_chunks, step_of
from tests.runtime.served import serving
from tests.runtime.tensorrt_standin import open_stand_in

pytest.importorskip("tensorrt_rtx_bindings")
OPTIONS = TensorRtOptions(
    compute_capabilities=(86,), max_num_seqs=5, chunk=48, max_context=200, draft_tokens=6, keep_onnx=True
)
TOKENS = np.random.default_rng(1).integers(0, 101, 150).tolist()
TABLE = [7, 2, 11, 5, 13, 8, 1]
POOL = 640
BOUND = 1e-4
"""Both compute in float32; what is left is the order of the sums."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sliding windows, and asymmetric weights that go through the correction."""
    folder = tmp_path_factory.mktemp("tensorrt")
    source = write_family("qwen2-window", folder / "source")
    return write_quantized(source, folder / "model", {"mlp": IntScheme(4, 32, False)})


@pytest.fixture(scope="module")
def half(checkpoint: Path) -> Path:
    """The engine as the command builds it, and the float16 graph that it was built from."""
    folder = checkpoint.with_name("engine")
    compile_engine(checkpoint, "tensorrt-rtx", folder, tensorrt=OPTIONS, hidden_states="1,final")
    return folder


@pytest.fixture(scope="module")
def built(checkpoint: Path, half: Path) -> Path:
    """The same in float32, for exact comparison."""
    return in_float32(half, checkpoint, checkpoint.with_name("exact"))


def in_float32(half: Path, checkpoint: Path, folder: Path) -> Path:
    """An engine folder whose graph, and the types in its record, are float32's."""
    folder.mkdir()
    source = Checkpoint(checkpoint)
    config = read_config(source.config, "config.json")
    spec, weights = read_spec(half), CheckpointWeights(config, source)
    layers = spec.hidden_states.layers if spec.hidden_states else ()
    fold_zero_points(write_onnx(config, weights, folder, hidden_layers=layers))
    spec.save(folder)
    info = read_info(half)
    tensors = tuple(
        tensor.model_copy(update={"dtype": "Float"}) if tensor.dtype == "Half" else tensor
        for tensor in info.tensors
    )
    pool = info.pool.model_copy(update={"dtype": "Float"})
    info.model_copy(update={"tensors": tensors, "pool": pool}).save(folder)
    return folder


@pytest.fixture
def reference(checkpoint: Path) -> Engine:
    return open_engine(checkpoint, kv_cache_tokens=POOL)


@pytest.mark.parametrize("capture", [False, True])
def test_every_kind_of_step_has_the_logits_of_the_reference(
    capture: bool, built: Path, reference: Engine
) -> None:
    engine, contexts, device = open_stand_in(built, kv_cache_tokens=POOL, capture=capture)
    wanted = in_chunks(reference, TOKENS, TABLE, [150])
    for sizes in ([150], [33, 64, 53], [126, 1], [97, 5, 3, 7]):
        assert difference(in_chunks(engine, TOKENS, TABLE, sizes), wanted) < BOUND
    used = {profile for context in contexts for profile, _ in context.launches}
    assert used == {0, 1, 2}
    assert (device.num_replays > 0) == capture


def test_hidden_states_come_from_every_profile(built: Path, reference: Engine) -> None:
    engine, contexts, _ = open_stand_in(built, kv_cache_tokens=POOL)
    assert engine.hidden_states is not None
    assert reference.hidden_states is not None
    wanted = np.r_[reference.hidden_states.columns(1), reference.hidden_states.columns("final")]
    for each in (engine, reference):
        each.run(step_of(Chunk(TOKENS[:60], 0, TABLE), Chunk(TOKENS[:40], 0, [3, 9])))
    step = step_of(
        Chunk(TOKENS[60:65], 60, TABLE), Chunk(TOKENS[40:41], 40, [3, 9]), Chunk(TOKENS[:70], 0, [4, 0, 6])
    )
    step = replace(step, logit_rows=np.array([4, 75], np.int32))
    for rows in ([], [0, 4, 5], range(76), [40]):
        asked = replace(step, hidden_rows=np.array(rows, np.int32))
        result, exact = engine.run_with_hidden(asked), reference.run_with_hidden(asked)
        assert difference(result.logits, exact.logits) < BOUND
        assert result.hidden.shape == (len(rows), 192)
        assert np.allclose(result.hidden, exact.hidden[:, wanted], atol=BOUND * 10)
    assert all(context.launches for context in contexts)


def test_the_float16_engine_drifts_by_its_rounding(half: Path, reference: Engine) -> None:
    """Numbers of 11 bits, rounded anew in each of 3 layers: a percent or so of a logit."""
    engine, _, _ = open_stand_in(half, kv_cache_tokens=POOL)
    wanted = in_chunks(reference, TOKENS, TABLE, [150])
    assert BOUND < difference(in_chunks(engine, TOKENS, TABLE, [97, 5, 3, 1]), wanted) < 0.03


def test_a_mixed_batch_is_cut_into_the_calls_that_the_profiles_allow(built: Path, reference: Engine) -> None:
    engine, contexts, _ = open_stand_in(built, kv_cache_tokens=POOL)
    tables = [[3, 9], [4], [10], [12], [14], [15], [16], [17]]
    before = step_of(
        Chunk(TOKENS[:140], 0, TABLE), *(Chunk(TOKENS[i : i + 9], 0, t) for i, t in enumerate(tables))
    )
    mixed = step_of(
        Chunk(TOKENS[140:141], 140, TABLE),
        *(Chunk(TOKENS[50:51], 9, table) for table in tables[1:]),
        Chunk(TOKENS[20:62], 9, tables[0]),
        Chunk(TOKENS[:4], 0, [0]),
        rows=[0, 3, 7, 8, 30, 53],
    )
    for step in (before, mixed):
        assert difference(engine.run(step), reference.run(step)) < BOUND
    decodes = [shapes["token_ids"] for profile, shapes in contexts[1].launches]
    # the long past goes alone, since padding seven others to it costs more than these few weights
    assert decodes == [(1, 1), (5, 1), (2, 1)]


def test_a_tree_of_drafts_is_verified_and_its_accepted_path_moved_together(
    built: Path, reference: Engine
) -> None:
    engine, contexts, _ = open_stand_in(built, kv_cache_tokens=POOL)
    prompt, parents = TOKENS[:70], [-1, 0, 0, 1, 2, 4]
    for each in (engine, reference):
        each.run(step_of(Chunk(prompt, 0, TABLE)))
    mask, depth = np.eye(len(parents), dtype=np.bool_), []
    for node, parent in enumerate(parents):
        mask[node] |= mask[parent] if parent >= 0 else False
        depth.append(mask[node].sum() - 1)
    plain = step_of(Chunk(TOKENS[80:86], 70, TABLE), Chunk(TOKENS[:5], 0, [0]))
    tree = Step(
        plain.token_ids,
        np.concatenate([70 + np.array(depth), plain.positions[6:]]).astype(np.int32),
        plain.past_lens,
        plain.new_lens,
        plain.block_tables,
        plain.logit_rows,
        masks=[mask, None],
    )
    assert difference(engine.run(tree), reference.run(tree)) < BOUND
    assert contexts[2].launches[-1][1]["token_ids"] == (2, 6)
    path = np.array([0, 2, 4, 5], np.int32)
    for each in (engine, reference):
        each.move_slots(
            slots_of(TABLE, 70 + path, 32), slots_of(TABLE, 70 + np.arange(4, dtype=np.int32), 32)
        )
    following = step_of(Chunk(TOKENS[:1], 74, TABLE))
    accepted = [*prompt, *(TOKENS[80 + node] for node in path), TOKENS[0]]
    fresh = in_chunks(reference, accepted, [18, 19, 10], [len(accepted)])[-1:]
    assert difference(engine.run(following), fresh) < BOUND


def test_a_copied_block_serves_as_its_source(built: Path) -> None:
    engine, _, _ = open_stand_in(built, kv_cache_tokens=POOL)
    engine.run(step_of(Chunk(TOKENS[:40], 0, [3, 9])))
    engine.copy_block(3, 6)
    step, copied = (step_of(Chunk(TOKENS[40:41], 40, table)) for table in ([3, 9], [6, 9]))
    assert np.array_equal(engine.run(step), engine.run(copied))


def test_a_step_that_wants_no_logits_writes_the_pool_all_the_same(built: Path, reference: Engine) -> None:
    engine, _, _ = open_stand_in(built, kv_cache_tokens=POOL)
    for each in (engine, reference):
        assert each.run(step_of(Chunk(TOKENS[:60], 0, TABLE), Chunk([5], 0, [0]), rows=[])).shape == (0, 101)
    step = step_of(Chunk(TOKENS[60:61], 60, TABLE))
    assert difference(engine.run(step), reference.run(step)) < BOUND


def test_it_serves_over_http_what_the_reference_does(tmp_path: Path, byte_tokenizer: Tokenizer) -> None:
    """Six answers at once: prompts in chunks beside decoding, with more sequences than one call takes."""
    config = LlamaConfig(**{**SHAPE, "vocab_size": 320, "num_hidden_layers": 2}, head_dim=16)
    checkpoint = write_model(config, tmp_path / "model")
    compile_engine(checkpoint, "tensorrt-rtx", tmp_path / "half", tensorrt=OPTIONS)
    folder = in_float32(tmp_path / "half", checkpoint, tmp_path / "engine")
    engine, contexts, _ = open_stand_in(folder, kv_cache_tokens=1024)
    prompts = [f"{number} bottles of beer on the wall, " * number for number in range(1, 7)]

    def answers(url: OpenAI) -> list[str]:
        def ask(prompt: str) -> str:
            asked = url.completions.create(model="model", prompt=prompt, max_tokens=12, temperature=0)
            return asked.choices[0].text

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(ask, prompts))

    found = []
    for each in (engine, open_engine(checkpoint, kv_cache_tokens=1024)):
        with serving(each, byte_tokenizer) as served:
            found.append(answers(served.openai()))
    assert found[0] == found[1]
    assert contexts[0].launches
    assert contexts[1].launches


def test_what_the_engine_was_not_built_for_is_refused(built: Path) -> None:
    engine, _, _ = open_stand_in(built, kv_cache_tokens=POOL)
    with pytest.raises(QtoolError, match=r"8 blocks of past, the engine was built for 7.*max_context"):
        engine.run(step_of(Chunk([1], 250, list(range(9)))))
    wide = step_of(Chunk(TOKENS[:50], 0, TABLE))
    tree = Step(**{**vars(wide), "masks": [np.eye(50, dtype=np.bool_)]})
    with pytest.raises(QtoolError, match="a tree of 50 drafts is wider than the 48 tokens"):
        engine.run(tree)
    most = read_info(built).pool.max_blocks
    with pytest.raises(UsageError, match=rf"{most + 1} blocks, the engine was built for {most} at most"):
        open_stand_in(built, kv_cache_tokens=32 * most + 1)


def test_without_a_gpu_opening_says_so(half: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(QtoolError, match="runs on an NVIDIA GPU, and torch sees none"):
        open_engine(half)
