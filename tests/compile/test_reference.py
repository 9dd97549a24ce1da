"""The reference engine against transformers, and against itself whatever way the tokens are run."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.compile.config import read_config
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.runtime.engines.contract import Floats
from qtool.runtime.engines.reference import ReferenceEngine
from tests.compile.checkpoints import FAMILIES, write_family
from tests.compile.steps import Chunk, difference, in_chunks, step_of

TOKENS = np.random.default_rng(0).integers(0, 101, 77).tolist()
BOUND = 1e-4
"""Both run in float32; what is left is the order of the sums."""


def open_checkpoint(folder: Path, block_size: int = 16) -> ReferenceEngine:
    checkpoint = Checkpoint(folder)
    config = read_config(checkpoint.config, str(folder))
    return ReferenceEngine(
        config, CheckpointWeights(config, checkpoint), num_blocks=24, block_size=block_size
    )


def transformers_logits(folder: Path, tokens: list[int]) -> Floats:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        logits: Floats = model(torch.tensor([tokens])).logits[0].numpy()
    return logits


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(request.param, tmp_path_factory.mktemp("family") / request.param)


def test_every_family_has_the_logits_of_transformers(family: Path) -> None:
    wanted = transformers_logits(family, TOKENS)
    engine = open_checkpoint(family)
    table = [4, 9, 1, 7, 0]
    assert difference(in_chunks(engine, TOKENS, table, [77]), wanted) < BOUND
    assert difference(in_chunks(engine, TOKENS, table, [13, 31]), wanted) < BOUND
    assert difference(in_chunks(engine, TOKENS, table, [70, 1]), wanted) < BOUND


def test_a_ragged_batch_gives_each_sequence_its_own_logits(family: Path) -> None:
    engine = open_checkpoint(family, block_size=5)
    first, second, third = TOKENS[:41], TOKENS[20:33], TOKENS[50:57]
    alone = [in_chunks(engine, tokens, list(range(9)), [77]) for tokens in (first, second, third)]
    tables = [[11, 3, 20, 5, 8, 1, 9, 2, 6], [4, 15, 7], [19, 0]]
    engine.run(step_of(Chunk(first[:40], 0, tables[0]), Chunk(second[:6], 0, tables[1])))
    mixed = engine.run(
        step_of(Chunk(first[40:], 40, tables[0]), Chunk(second[6:], 6, tables[1]), Chunk(third, 0, tables[2]))
    )
    assert difference(mixed, np.concatenate([alone[0][40:], alone[1][6:], alone[2]])) < BOUND


def test_sequences_that_share_a_prefix_share_its_blocks(tiny: Path) -> None:
    engine = open_checkpoint(tiny, block_size=8)
    alone = in_chunks(engine, TOKENS[:20], [5, 6, 7], [20])
    engine.run(step_of(Chunk(TOKENS[:16], 0, [0, 1])))
    shared = engine.run(
        step_of(Chunk(TOKENS[16:20], 16, [0, 1, 2]), Chunk([9, 9], 16, [0, 1, 3]), rows=[0, 1, 2, 3])
    )
    assert difference(shared, alone[16:]) < BOUND


def test_a_copied_block_is_independent_of_its_source(tiny: Path) -> None:
    engine = open_checkpoint(tiny, block_size=8)
    wanted = in_chunks(engine, TOKENS[:12], [0, 1], [12])[-1:]
    engine.copy_block(1, 4)
    engine.run(step_of(Chunk([8, 8, 8], 8, [0, 1])))
    assert difference(engine.run(step_of(Chunk(TOKENS[11:12], 11, [0, 4]))), wanted) < BOUND
    assert difference(engine.run(step_of(Chunk(TOKENS[11:12], 11, [0, 1]))), wanted) > BOUND


def test_only_the_wanted_rows_have_logits(tiny: Path) -> None:
    engine = open_checkpoint(tiny)
    every = engine.run(step_of(Chunk(TOKENS[:9], 0, [0])))
    some = engine.run(step_of(Chunk(TOKENS[:9], 0, [0]), rows=[2, 8]))
    assert difference(some, every[[2, 8]]) < BOUND
