"""What the contenders of quantize_vs_peers.py share: the job each is handed, and how its model is judged.

Runs in every contender's own environment, so it needs torch, numpy, safetensors and qtool's folder alone.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from qtool.eval.drift import ChunkDrift, chunk_drift, total_drift

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK = 256
"""Positions whose logits are compared at once."""


@dataclass(frozen=True)
class Job:
    """One quantization, said so that every library can be asked for the same."""

    checkpoint: str
    method: str
    scheme: str
    """int4-g64-asym and the like, w8a8, w8a8-static, fp8 or fp8-static; activations are int8 or fp8, each
    token by its own range unless static."""
    scope: str
    """mlp, or linears: all but lm_head."""
    calibration_text: str
    num_samples: int
    seq_len: int
    seed: int
    threads: int
    windows: str
    """A safetensors file: calibration [num_samples, seq_len] and evaluation [count, length], token ids."""
    baseline: str
    """A .npy file: what the unquantized model gives on the evaluation windows, logits [count, length, V]."""

    @property
    def calibration(self) -> Tensor:
        return load_file(self.windows)["calibration"]

    @property
    def integers(self) -> tuple[int, int, bool]:
        """Bits, group size and whether symmetric, of a scheme of weights alone."""
        found = re.fullmatch(r"int(\d)-g(\d+)-(a?sym)", self.scheme)
        if found is None:
            raise SystemExit(f"scheme {self.scheme}: wanted intBITS-gGROUP-sym or -asym")
        return int(found[1]), int(found[2]), found[3] == "sym"


@dataclass(frozen=True)
class Result:
    """What quantizing took and what came out; drift as in qtool.eval.drift."""

    version: str
    seconds: float
    """From opening the checkpoint to the quantized model; imports are not counted."""
    peak_memory_bytes: int
    """Resident memory of the whole process at its peak, imports counted."""
    kl_mean: float
    kl_p99: float
    top1_agreement: float
    perplexity_base: float
    perplexity: float


@dataclass
class Costs:
    """Filled when `measured` ends."""

    seconds: float = 0.0
    peak_memory_bytes: int = 0


@contextmanager
def measured() -> Iterator[Costs]:
    """Time what is done inside, and read the process's peak memory after it."""
    costs, started = Costs(), time.monotonic()
    yield costs
    costs.seconds = time.monotonic() - started
    # not getrusage: its peak is kept from the parent across exec
    status = Path("/proc/self/status").read_text()
    costs.peak_memory_bytes = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024


def read_job() -> Job:
    """The job that the command line names, with torch's threads set."""
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(job.threads)
    return job


def load_model(job: Job) -> "PreTrainedModel":
    """The checkpoint in float32 by transformers: what drift is measured in."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32).eval()


def unknown_method(job: Job) -> SystemExit:
    return SystemExit(f"method {job.method} is not known for scheme {job.scheme}")


def transformers_logits(model: "PreTrainedModel") -> Callable[[Tensor], Tensor]:
    """One window [T] to logits [T, V], by the model's own forward, its rounding of activations included."""
    return lambda window: model(input_ids=window[None], use_cache=False).logits[0]


@torch.no_grad()
def judge(job: Job, library: str, costs: Costs, logits: Callable[[Tensor], Tensor]) -> None:
    """Measure the drift of a model's `logits` from the baseline's, and write the result."""
    baseline = np.load(job.baseline, mmap_mode="r")
    chunks: list[ChunkDrift] = []
    for base, window in zip(baseline, load_file(job.windows)["evaluation"], strict=True):
        other = logits(window).float()
        for start in range(0, len(window), CHUNK):
            rows = slice(start, start + CHUNK)
            following = window[start + 1 : start + CHUNK + 1]
            chunks.append(chunk_drift(torch.from_numpy(base[rows].copy()), other[rows], following))
    drift = total_drift(chunks)
    result = Result(
        version=version(library),
        seconds=costs.seconds,
        peak_memory_bytes=costs.peak_memory_bytes,
        kl_mean=drift.kl_mean,
        kl_p99=drift.kl_p99,
        top1_agreement=drift.top1_agreement,
        perplexity_base=drift.perplexity_base,
        perplexity=drift.perplexity,
    )
    Path(sys.argv[2]).write_text(json.dumps(asdict(result)))
