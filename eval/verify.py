"""Verify an engine where its own machine is not at hand: run the graph it was built from, on this CPU."""

from collections.abc import Callable
from pathlib import Path

from qtool.compile.engine import read_spec
from qtool.core.recipe import Evaluation
from qtool.eval.evaluate import evaluate
from qtool.eval.report import DriftReport
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Engine
from qtool.runtime.engines.onnx import MODEL, OnnxEngine

NUM_WINDOWS, WINDOW_LEN = 2, 512
"""Enough to see a wrong graph; ``qtool eval`` is there to judge one that is right."""


def verify(
    engine: Path,
    checkpoint: Path,
    *,
    threads: int | None = None,
    on_window: Callable[[], None] = lambda: None,
) -> DriftReport:
    """Drift of a compiled graph from the checkpoint that it was compiled from: what compiling cost.

    An engine for another machine has to hold the ONNX graph that it was built from beside it. Raises
    QtoolError when the graph gives logits that are not finite.
    """
    window_len = min(WINDOW_LEN, read_spec(engine).max_context)
    evaluation = Evaluation(num_windows=NUM_WINDOWS, window_len=window_len)
    return evaluate(
        engine, checkpoint, evaluation, threads=threads, on_window=on_window, open_model=open_twin
    )


def open_twin(engine: Path, *, kv_cache_tokens: int | None = None, threads: int | None = None) -> Engine:
    """The engine's ONNX graph in ONNX Runtime where there is one, else the engine itself."""
    if not (engine / MODEL).is_file():
        return open_engine(engine, kv_cache_tokens=kv_cache_tokens, threads=threads)
    return OnnxEngine(engine / MODEL, read_spec(engine), kv_cache_tokens=kv_cache_tokens, threads=threads)
