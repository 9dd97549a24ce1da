"""Judge a model on disk against its baseline: open both, run the windows, hold the gates."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from qtool.calibrate.text import load_records
from qtool.calibrate.windows import check_vocabulary, load_tokenizer, sequential_windows, tokenize
from qtool.core.recipe import Evaluation
from qtool.errors import UsageError
from qtool.eval.compare import compare
from qtool.eval.gates import check_gates
from qtool.eval.report import DriftReport
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Engine


def evaluate(
    model: Path,
    baseline: Path,
    evaluation: Evaluation,
    *,
    threads: int | None = None,
    on_window: Callable[[], None] = lambda: None,
    open_model: Callable[..., Engine] = open_engine,
) -> DriftReport:
    """Drift of `model` from `baseline`, each a checkpoint or an engine folder, as `evaluation` says.

    The baseline's tokenizer cuts the text. The gates are held but not enforced: see `DriftReport.passed`.
    `open_model` opens the model in another way than its target says.
    """
    windows = evaluation_windows(baseline, evaluation)
    base = open_engine(baseline, kv_cache_tokens=evaluation.window_len, threads=threads)
    check_vocabulary(windows, base.vocab_size, baseline)
    other = open_model(model, kv_cache_tokens=evaluation.window_len, threads=threads)
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


def evaluation_windows(baseline: Path, evaluation: Evaluation) -> Tensor:
    """The first windows [num_windows, window_len] of the text, cut by the baseline's tokenizer."""
    token_ids = tokenize(load_tokenizer(baseline), load_records(evaluation.dataset), chat_template=False)
    try:
        return sequential_windows(token_ids, evaluation.window_len, evaluation.num_windows)
    except UsageError as error:
        raise UsageError(f"{evaluation.dataset}: {error}") from error
