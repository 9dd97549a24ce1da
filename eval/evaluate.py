"""Judge a model on disk against its baseline: open both, run the windows, hold the gates."""

from collections.abc import Callable
from pathlib import Path

from qtool.calibrate.windows import sequential_windows

from qtool.core.recipe import Evaluation
from qtool.eval.compare import compare
from qtool.eval.gates import check_gates
from qtool.eval.report import DriftReport
from qtool.runtime.engines import open_engine


def evaluate(
    model: Path,
    baseline: Path,
    evaluation: Evaluation,
    *,
    threads: int | None = None,
    on_window: Callable[[], None] = lambda: None,
) -> DriftReport:
    """Drift of `model` from `baseline`, each a checkpoint or an engine folder, as `evaluation` says.

    The baseline's tokenizer cuts the text. The gates are held but not enforced: see `DriftReport.passed`.
    """
    windows = sequential_windows(
        baseline, evaluation.dataset, length=evaluation.window_len, count=evaluation.num_windows
    )
    base = open_engine(baseline, kv_cache_tokens=evaluation.window_len, threads=threads)
    other = open_engine(model, kv_cache_tokens=evaluation.window_len, threads=threads)
    drift = compare(base, other, windows, on_window)
    return DriftReport(
        model=str(model),
        baseline=str(baseline),
        dataset=evaluation.dataset,
        num_windows=len(windows),
        window_len=evaluation.window_len,
        drift=drift,
        perplexity_increase=drift.perplexity_increase,
        gates=check_gates(evaluation.gates, drift),
    )
