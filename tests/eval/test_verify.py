"""Verifying a compiled graph against the checkpoint that it was compiled from."""

from pathlib import Path

import pytest

from qtool.compile.backends.onnx import DATA
from qtool.compile.build import compile_engine
from qtool.compile.engine import ENGINE
from qtool.eval.verify import verify


@pytest.fixture
def engine(tiny: Path, tmp_path: Path) -> Path:
    compile_engine(tiny, "onnx", tmp_path / "engine")
    return tmp_path / "engine"


def test_a_graph_that_is_right_does_not_drift(engine: Path, tiny: Path) -> None:
    """Both run in float32: what is left of the KL is the order of the sums."""
    drift = verify(engine, tiny).drift
    assert drift.kl_mean < 1e-6
    assert drift.top1_agreement > 0.999
    assert drift.positions == 2 * 256  # the model's context cuts the windows


def test_a_graph_that_is_wrong_drifts(engine: Path, tiny: Path) -> None:
    data = bytearray((engine / DATA).read_bytes())
    data[len(data) // 2 : len(data) // 2 + 20_000] = bytes(20_000)
    (engine / DATA).write_bytes(data)
    assert verify(engine, tiny).drift.kl_mean > 0.01


def test_an_engine_for_another_machine_is_verified_by_the_graph_beside_it(engine: Path, tiny: Path) -> None:
    spec = (engine / ENGINE).read_text()
    (engine / ENGINE).write_text(spec.replace('"target": "onnx"', '"target": "tensorrt"'))
    assert verify(engine, tiny).drift.kl_mean < 1e-6
