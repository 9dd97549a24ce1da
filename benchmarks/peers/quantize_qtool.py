"""qtool itself, under the same clock: quantize by a recipe, then judge by the reference engine.

The method is a recipe's. With -mse at the end (rtn-mse) ranges of weights are searched, with -correct
(awq+gptq-correct) layers make up for the errors before them, as those options of a recipe's method say.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quantize_job import Job, judge, measured, read_job
from torch import Tensor

from qtool.calibrate.windows import recipe_windows
from qtool.core.checkpoint import Checkpoint
from qtool.core.recipe import Recipe
from qtool.eval.compare import window_logits
from qtool.quantize.pipeline import quantize_checkpoint
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Engine

WINDOW = 1024
"""Tokens that the engine holds: an evaluation window."""


OPTIONS = {"mse": "search_range", "correct": "correct"}


def method(job: Job) -> dict[str, Any]:
    """A recipe's method, with the options that follow its name."""
    name, *options = job.method.split("-")
    return {"name": name, **{OPTIONS[option]: True for option in options}}


def rule(job: Job) -> dict[str, Any]:
    """The one rule of a recipe."""
    numbers: dict[str, Any]
    kind, _, static = job.scheme.partition("-")
    if kind in ("w8a8", "fp8"):
        weights = (
            {"num_bits": 8, "group_size": None, "symmetric": True} if kind == "w8a8" else {"format": "fp8"}
        )
        activations = {"format": "int8" if kind == "w8a8" else "fp8", "dynamic": not static}
        numbers = {"weights": weights, "activations": activations}
    else:
        bits, group_size, symmetric = job.integers
        numbers = {"weights": {"num_bits": bits, "group_size": group_size, "symmetric": symmetric}}
    targets = ["*.mlp.*"] if job.scope == "mlp" else ["*.mlp.*", "*.self_attn.*"]
    return {"targets": targets, **numbers, "method": method(job)}


def recipe(job: Job) -> Recipe:
    calibration = {
        "dataset": job.calibration_text,
        "num_samples": job.num_samples,
        "seq_len": job.seq_len,
        "seed": job.seed,
    }
    quantization = {"rules": [rule(job)], "keep": ["lm_head", "*.embed_tokens"]}
    return Recipe.model_validate({"calibration": calibration, "quantization": quantization})


def logits(window: Tensor, engine: Engine) -> Tensor:
    """The logits [T, V] of one window [T]."""
    return torch.cat(list(window_logits(engine, window.numpy().astype(np.int32))))


def main() -> None:
    job = read_job()
    chosen = recipe(job)
    checkpoint = Path(job.checkpoint)
    assert torch.equal(recipe_windows(Checkpoint(checkpoint), chosen.calibration)[0], job.calibration)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out"
        with measured() as costs:
            quantize_checkpoint(checkpoint, chosen, output)
        engine = open_engine(output, kv_cache_tokens=WINDOW, threads=job.threads)
        judge(job, "qtool", costs, lambda window: logits(window, engine))


if __name__ == "__main__":
    main()
