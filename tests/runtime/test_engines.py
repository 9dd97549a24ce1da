"""Opening engines: what a path may hold, how large the pool gets, how thin serving stays."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qtool.compile.build import compile_engine
from qtool.errors import QtoolError, UsageError
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.pool import DEFAULT_TOKENS, num_blocks
from tests.compile.steps import Chunk, difference, in_chunks, step_of

TOKENS = np.random.default_rng(2).integers(0, 320, 50).tolist()
TARGETS = ["openvino", "reference"]


@pytest.fixture(scope="module", params=TARGETS)
def folder(request: pytest.FixtureRequest, tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / request.param
    compile_engine(tiny, request.param, path)
    return path


def test_an_engine_folder_and_its_checkpoint_folder_have_the_same_logits(folder: Path, tiny: Path) -> None:
    engine, reference = open_engine(folder, kv_cache_tokens=100), open_engine(tiny, kv_cache_tokens=100)
    assert (engine.vocab_size, engine.max_context, engine.block_size, engine.num_blocks) == (320, 256, 32, 4)
    logits = in_chunks(engine, TOKENS, [3, 1], [20])
    assert logits.dtype == np.float32
    assert difference(logits, in_chunks(reference, TOKENS, [0, 2], [50])) < 1e-4


def test_logits_stay_as_they_were_when_the_next_step_runs(folder: Path) -> None:
    engine = open_engine(folder, kv_cache_tokens=100)
    first = engine.run(step_of(Chunk(TOKENS[:9], 0, [0])))
    before = first.copy()
    engine.run(step_of(Chunk(TOKENS[9:18], 9, [0])))
    assert np.array_equal(first, before)


def test_a_copied_block_is_independent_of_its_source(folder: Path) -> None:
    engine = open_engine(folder, kv_cache_tokens=200)
    wanted = in_chunks(engine, TOKENS[:40], [0, 1], [40])[-1:]
    engine.copy_block(1, 4)
    engine.run(step_of(Chunk([8] * 8, 32, [0, 1])))
    assert difference(engine.run(step_of(Chunk(TOKENS[39:40], 39, [0, 4]))), wanted) < 1e-4
    assert difference(engine.run(step_of(Chunk(TOKENS[39:40], 39, [0, 1]))), wanted) > 1e-2


def test_sequences_that_share_a_prefix_share_its_blocks(folder: Path) -> None:
    engine = open_engine(folder, kv_cache_tokens=200)
    wanted = in_chunks(engine, TOKENS[:40], [4, 5], [40])[32:]
    engine.run(step_of(Chunk(TOKENS[:32], 0, [0])))
    shared = engine.run(
        step_of(Chunk([9, 9], 32, [0, 2]), Chunk(TOKENS[32:40], 32, [0, 1]), rows=range(2, 10))
    )
    assert difference(shared, wanted) < 1e-4


def test_a_table_too_short_for_its_tokens_is_an_error(folder: Path) -> None:
    engine = open_engine(folder, kv_cache_tokens=100)
    with pytest.raises((ValueError, IndexError)):
        engine.run(step_of(Chunk(TOKENS[:40], 0, [0])))


def test_a_folder_that_is_no_engine_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds neither engine\.json nor config\.json"):
        open_engine(tmp_path)
    (tmp_path / "engine.json").write_text(
        (folder / "engine.json").read_text().replace(f'"target": "{folder.name}"', '"target": "abacus"')
    )
    with pytest.raises(QtoolError, match=r"target 'abacus' has no driver; known: .*openvino, reference"):
        open_engine(tmp_path)


def test_a_damaged_openvino_graph_is_an_error_that_names_the_file(tiny: Path, tmp_path: Path) -> None:
    compile_engine(tiny, "openvino", tmp_path / "engine")
    graph = tmp_path / "engine" / "model.xml"
    graph.write_text("<net".ljust(graph.stat().st_size))
    with pytest.raises(QtoolError, match=r"model\.xml: cannot be read by OpenVINO"):
        open_engine(tmp_path / "engine", kv_cache_tokens=32)


def test_the_pool_holds_at_least_the_tokens_that_were_asked_for() -> None:
    assert [num_blocks(tokens, 32, 1) for tokens in (1, 32, 33)] == [1, 1, 2]
    assert num_blocks(None, 32, 1) == DEFAULT_TOKENS // 32
    assert num_blocks(None, 32, 1 << 60) == 1
    with pytest.raises(UsageError, match="kv_cache_tokens is 0, wanted at least 1"):
        num_blocks(0, 32, 1)


def test_serving_an_openvino_engine_imports_neither_torch_nor_transformers(
    tiny: Path, tmp_path: Path
) -> None:
    compile_engine(tiny, "openvino", tmp_path / "engine")
    script = (
        "import sys; from pathlib import Path; from qtool.runtime.engines import open_engine\n"
        f"open_engine(Path({str(tmp_path / 'engine')!r}), kv_cache_tokens=32, threads=1)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"
