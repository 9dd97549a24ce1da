"""Trees of drafts on every engine: verified in one step as their chains are in many, and kept in the pool."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qtool.compile.build import compile_engine
from qtool.errors import QtoolError
from qtool.runtime.engines import onnx as onnx_driver
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Bools, Engine, Ints, Step, slots_of
from tests.compile.checkpoints import write_family
from tests.compile.steps import Chunk, difference, in_chunks, step_of

TOKENS = np.random.default_rng(5).integers(0, 101, 100).tolist()
PARENTS = [-1, 0, 0, 1, 1, 2, 5, 4]
"""Of each node of the tree; the root is the token that the step before gave."""
NODES = [17, 3, 88, 42, 3, 60, 9, 71]
TABLE, OTHER = [7, 2, 11], [5, 13, 4]
BOUND = 1e-4
"""All engines run in float32; what is left is the order of the sums."""
Opener = Callable[..., Engine]


def path_to(node: int) -> list[int]:
    """The nodes from the root to `node`, both included."""
    return [*(path_to(PARENTS[node]) if node else []), node]


def tree_mask() -> Bools:
    mask = np.zeros((len(PARENTS), len(PARENTS)), np.bool_)
    for node in range(len(PARENTS)):
        mask[node, path_to(node)] = True
    return mask


def verify(past: int, *others: Chunk) -> Step:
    """A step that verifies the tree after `past` tokens, beside other chunks."""
    step = step_of(Chunk(NODES, past, TABLE), *others)
    depths = np.array([len(path_to(node)) - 1 for node in range(len(PARENTS))], np.int32)
    positions = np.concatenate([past + depths, step.positions[len(PARENTS) :]])
    return replace(step, positions=positions, masks=[tree_mask(), *[None] * len(others)])


def places(nodes: list[int], past: int) -> Ints:
    return np.array([past + node for node in nodes], np.int32)


@pytest.fixture
def open_target(tmp_path: Path) -> Opener:
    """Opens an engine of the target for a family, written and compiled on the way."""

    def build(target: str, family: str = "llama", kv_cache: str = "f32") -> Engine:
        model = write_family(family, tmp_path / "model")
        compile_engine(model, target, tmp_path / "engine", kv_cache=kv_cache)
        return open_engine(tmp_path / "engine", kv_cache_tokens=640, threads=1)

    return build


@pytest.mark.parametrize("past", [0, 31, 40])
@pytest.mark.parametrize(
    ("target", "family"),
    [
        ("reference", "llama"),
        ("reference", "mistral"),  # its window of 21 cuts within the past
        ("onnx", "llama"),
        ("onnx", "mistral"),
        ("openvino", "llama"),
    ],
)
def test_a_tree_has_the_logits_of_its_chains_and_its_accepted_path_is_kept(
    target: str, family: str, past: int, open_target: Opener
) -> None:
    engine = open_target(target, family)
    assert engine.takes_trees
    for table in (TABLE, OTHER):
        if past:
            engine.run(step_of(Chunk(TOKENS[:past], 0, table)))
    others = Chunk(TOKENS[:9], 0, [3]), Chunk(TOKENS[9:10], 0, [6])
    logits = engine.run(verify(past, *others))
    for node in (3, 6, 7):  # the leaves
        path = path_to(node)
        chain = engine.run(step_of(Chunk([NODES[step] for step in path], past, OTHER)))
        assert difference(logits[path], chain) < BOUND
    assert difference(logits[len(NODES) :], engine.run(step_of(*others))) < BOUND

    accepted = path_to(7)  # the last chain, so that the other table holds what is to be kept
    kept = list(range(len(accepted)))
    engine.move_slots(
        slots_of(TABLE, places(accepted, past), engine.block_size),
        slots_of(TABLE, places(kept, past), engine.block_size),
    )
    end = past + len(accepted)
    following = [engine.run(step_of(Chunk(TOKENS[50:53], end, table))) for table in (TABLE, OTHER)]
    assert difference(following[0], following[1]) < BOUND


@pytest.mark.parametrize("target", ["reference", "onnx", "openvino"])
def test_slots_move_as_if_all_were_read_before_any_is_written(target: str, open_target: Opener) -> None:
    """Two tokens with one position, exchanged: to attention they are a set."""
    engine = open_target(target)
    step = step_of(Chunk(TOKENS[:8], 0, [2]))
    mask = np.eye(8, dtype=np.bool_)
    step = replace(step, positions=np.zeros(8, np.int32), masks=[mask])
    engine.run(step)
    wanted = engine.run(step_of(Chunk(TOKENS[8:10], 8, [2])))
    start = 2 * engine.block_size
    sources, targets = np.array([1, 6], np.int32) + start, np.array([6, 1], np.int32) + start
    engine.move_slots(sources, targets)
    assert difference(engine.run(step_of(Chunk(TOKENS[8:10], 8, [2]))), wanted) < BOUND


@pytest.mark.parametrize(("family", "kv_cache"), [("mistral", "f32"), ("llama", "u8")])
def test_an_engine_that_takes_no_trees_says_so(family: str, kv_cache: str, open_target: Opener) -> None:
    engine = open_target("openvino", family, kv_cache)
    assert not engine.takes_trees
    with pytest.raises(QtoolError, match="takes chains of drafts, no trees"):
        engine.run(verify(0))
    with pytest.raises(QtoolError, match="takes chains of drafts, no trees"):
        engine.move_slots(np.array([1], np.int32), np.array([0], np.int32))


def test_sequences_of_different_lengths_can_be_padded_to_one_rectangle(
    open_target: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What engines with few fixed shapes do; here the graph takes any, and gives the same."""
    engine = open_target("onnx", "mistral")
    engine.run(step_of(Chunk(TOKENS[:40], 0, TABLE), Chunk(TOKENS[:70], 0, OTHER)))
    step = verify(
        40, Chunk(TOKENS[70:73], 70, OTHER), Chunk(TOKENS[:1], 0, [3]), Chunk(TOKENS[:33], 0, [0, 1])
    )
    step = replace(step, logit_rows=np.array([0, 5, 8, 10, 11, 40, 44], np.int32))
    apart = engine.run(step)
    monkeypatch.setattr(onnx_driver, "by_length", lambda step: [list(range(len(step.new_lens)))])
    engine.run(step_of(Chunk([1] * 33, 0, [0, 1]), Chunk([1], 0, [3])))
    assert difference(engine.run(step), apart) < BOUND
    after = step_of(Chunk(TOKENS[60:65], 33, [0, 1]), Chunk(TOKENS[1:4], 1, [3]))
    padded = engine.run(after)
    wanted = in_chunks(engine, [*TOKENS[:33], *TOKENS[60:65]], [8, 9], [33, 5])[33:]
    assert difference(padded[:5], wanted) < BOUND
    wanted = in_chunks(engine, TOKENS[:4], [10], [4])[1:]
    assert difference(padded[5:], wanted) < BOUND


def test_a_step_that_wants_no_logits_gives_none(open_target: Opener) -> None:
    engine = open_target("onnx")
    assert engine.run(step_of(Chunk(TOKENS[:40], 0, TABLE), rows=[])).shape == (0, 101)
