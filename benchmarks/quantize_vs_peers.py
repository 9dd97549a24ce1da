"""qtool's drift, time and memory beside other quantizers', each in its own environment.

    python benchmarks/quantize_vs_peers.py CHECKPOINT --results results.jsonl \\
        --calibration-text valid.txt --evaluation-text test.txt --scheme int4-g64-asym --scope mlp \\
        --peer llmcompressor=/venvs/llmcompressor/bin/python --peer gptqmodel=/venvs/gptqmodel/bin/python \\
        --contenders qtool:awq+gptq qtool:gptq llmcompressor:gptq gptqmodel:gptq --seeds 0 1 2

A contender is a library and its method: benchmarks/peers/quantize_LIBRARY.py says which it knows. All get
the checkpoint, the scheme, the scope and the same windows of token ids, drawn anew by each seed, and are
judged by their own model's forward in float32, over the first windows of the evaluation text, against the
unquantized model by transformers. Every run is a process of its own and a line of the results file; runs
that it holds already are not done again, and --report only prints what it holds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EVALUATION = (8, 1024)
"""Windows and their length, as README's and DESIGN's figures have them."""


@dataclass(frozen=True)
class Cell:
    """What contenders are compared at."""

    scope: str
    scheme: str
    num_samples: int
    seq_len: int

    def __str__(self) -> str:
        return f"{self.scope}, {self.scheme}, {self.num_samples} windows of {self.seq_len}"


@dataclass(frozen=True)
class Run:
    """One line of the results file."""

    cell: Cell
    contender: str
    seed: int
    threads: int
    commit: str
    """qtool's when the run began, whoever the contender is."""
    result: dict[str, Any]
    """A Result of peers/quantize_job.py."""

    @property
    def key(self) -> tuple[Cell, str, int]:
        return self.cell, self.contender, self.seed


def read_runs(path: Path) -> list[Run]:
    """The runs that a results file holds, if there is one; a line that was cut short is left out."""
    if not path.exists():
        return []
    runs = []
    for line in path.read_text().splitlines():
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        runs.append(Run(**{**found, "cell": Cell(**found["cell"])}))
    return runs


@dataclass(frozen=True)
class Row:
    """A contender in one cell, over seeds: medians, and the least and the most."""

    contender: str
    seeds: list[int]
    kl: tuple[float, float, float]
    ratio: tuple[float, float, float] | None
    """Of its KL to the reference's with the same seed, over seeds that both have."""
    top1_agreement: float
    perplexity: float
    seconds: float
    peak_memory_bytes: float


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return statistics.median(values), min(values), max(values)


def table(runs: Iterable[Run], reference: str) -> list[Row]:
    """A row a contender for the runs of one cell, the least KL first. The last run of a seed counts."""
    latest: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for run in runs:
        latest[run.contender][run.seed] = run.result
    rows = []
    for contender, by_seed in latest.items():
        seeds = sorted(by_seed)
        results = [by_seed[seed] for seed in seeds]
        ratios = [
            by_seed[seed]["kl_mean"] / latest[reference][seed]["kl_mean"]
            for seed in seeds
            if seed in latest.get(reference, {})
        ]
        rows.append(
            Row(
                contender=contender,
                seeds=seeds,
                kl=spread([result["kl_mean"] for result in results]),
                ratio=spread(ratios) if ratios else None,
                **{
                    name: statistics.median(result[name] for result in results)
                    for name in ("top1_agreement", "perplexity", "seconds", "peak_memory_bytes")
                },
            )
        )
    return sorted(rows, key=lambda row: row.kl)


def render(cell: Cell, rows: list[Row], reference: str, *, seconds: bool = True) -> str:
    """A cell's rows as a Markdown table; `seconds` of runs that shared the machine are better left out."""
    titles = [
        "contender",
        "seeds",
        "KL, median (least to most)",
        f"ratio to {reference}",
        "top-1",
        "perplexity",
    ]
    titles += ["seconds"] * seconds + ["peak GiB"]
    lines = [f"**{cell}**", "", _line(titles), _line(["---"] * len(titles))]
    for row in rows:
        cells = [row.contender, ", ".join(map(str, row.seeds)), _spread(row.kl, 4, row.seeds)]
        cells += ["" if row.ratio is None else _spread(row.ratio, 2, row.seeds)]
        cells += [f"{row.top1_agreement:.1%}", f"{row.perplexity:.2f}"]
        cells += [f"{row.seconds:.0f}"] * seconds + [f"{row.peak_memory_bytes / 2**30:.2f}"]
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _spread(found: tuple[float, float, float], digits: int, seeds: Sequence[int]) -> str:
    median, least, most = (f"{one:.{digits}f}" for one in found)
    return median if len(seeds) == 1 else f"{median} ({least} to {most})"


def report(runs: list[Run], reference: str, *, as_json: bool, seconds: bool) -> None:
    cells = list(dict.fromkeys(run.cell for run in runs))
    tables = {cell: table([run for run in runs if run.cell == cell], reference) for cell in cells}
    if as_json:
        found = [
            {"cell": asdict(cell), "rows": [asdict(row) for row in rows]} for cell, rows in tables.items()
        ]
        print(json.dumps(found, indent=2))
    else:
        print("\n\n".join(render(cell, rows, reference, seconds=seconds) for cell, rows in tables.items()))


def write_baseline(checkpoint: Path, evaluation_text: str, folder: Path) -> None:
    """The evaluation windows, and what the unquantized model gives on them, once for all runs."""
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from qtool.core.recipe import Evaluation
    from qtool.eval.evaluate import evaluation_windows

    count, length = EVALUATION
    evaluation = Evaluation(dataset=evaluation_text, num_windows=count, window_len=length)
    windows = evaluation_windows(checkpoint, evaluation).contiguous()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    shape = (count, length, model.config.vocab_size)
    logits = np.lib.format.open_memmap(folder / "baseline.npy", mode="w+", dtype=np.float32, shape=shape)
    with torch.no_grad():
        for row, window in zip(logits, windows, strict=True):
            row[:] = model(input_ids=window[None], use_cache=False).logits[0].numpy()
    logits.flush()
    save_file({"evaluation": windows}, folder / "evaluation.safetensors")


def write_windows(checkpoint: Path, calibration_text: str, cell: Cell, seed: int, folder: Path) -> Path:
    """The token ids that every contender calibrates on with this seed, and those that all are judged on."""
    from safetensors.torch import load_file, save_file

    from qtool.calibrate.windows import recipe_windows
    from qtool.core.checkpoint import Checkpoint
    from qtool.core.recipe import Calibration

    calibration = Calibration(
        dataset=calibration_text, num_samples=cell.num_samples, seq_len=cell.seq_len, seed=seed
    )
    windows, _ = recipe_windows(Checkpoint(checkpoint), calibration)
    path = folder / f"windows-{cell.num_samples}-{cell.seq_len}-{seed}.safetensors"
    evaluation = load_file(folder / "evaluation.safetensors")
    save_file({"calibration": windows.contiguous(), **evaluation}, path)
    return path


def execute(python: str, library: str, job: dict[str, Any]) -> dict[str, Any] | None:
    """Run a contender's script on a job; its result, or None when it failed (it says why on stderr)."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(job["threads"]),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "LOGURU_LEVEL": "WARNING",
    }
    with tempfile.TemporaryDirectory() as folder:
        asked, given = Path(folder) / "job.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(job))
        script = ROOT / "benchmarks" / "peers" / f"quantize_{library}.py"
        ended = subprocess.run(
            [python, str(script), str(asked), str(given)],
            env=environment,
            cwd=folder,  # some leave files where they are started
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if ended.returncode == 0:
            result: dict[str, Any] = json.loads(given.read_text())
            return result
    print(f"{library}: exit code {ended.returncode}\n{ended.stderr[-3000:]}", file=sys.stderr)
    return None


def commit() -> str:
    """qtool's, with a plus where the working tree differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")


def measure(args: argparse.Namespace, pythons: dict[str, str]) -> bool:
    """Do the runs that the results file lacks, seed by seed; whether none failed."""
    checkpoint = Path(args.checkpoint).resolve()
    cell = Cell(args.scope, args.scheme, args.num_samples, args.seq_len)
    folder = args.results.with_suffix(".work")
    folder.mkdir(exist_ok=True)
    if not (folder / "evaluation.safetensors").exists():
        write_baseline(checkpoint, args.evaluation_text, folder)
    done = {run.key for run in read_runs(args.results)}
    succeeded = True
    for seed in args.seeds:
        wanted = [one for one in args.contenders if args.again or (cell, one, seed) not in done]
        if not wanted:
            continue
        windows = write_windows(checkpoint, args.calibration_text, cell, seed, folder)
        for contender in wanted:
            library, _, method = contender.partition(":")
            job = {
                "checkpoint": str(checkpoint),
                "method": method,
                **asdict(cell),
                "calibration_text": str(Path(args.calibration_text).resolve()),
                "seed": seed,
                "threads": args.threads,
                "windows": str(windows.resolve()),
                "baseline": str((folder / "baseline.npy").resolve()),
            }
            started_at = commit()
            result = execute(pythons[library], library, job)
            if result is None:
                succeeded = False
                continue
            run = Run(cell, contender, seed, args.threads, started_at, result)
            with args.results.open("a") as file:
                file.write(json.dumps(asdict(run)) + "\n")
            print(f"{cell}, seed {seed}: {contender} KL {result['kl_mean']:.4f}", file=sys.stderr, flush=True)
    return succeeded


def parse() -> tuple[argparse.Namespace, dict[str, str]]:
    """The options, and each library's python."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines; made or gone on with")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--json", action="store_true", help="print the tables as JSON")
    parser.add_argument("--no-seconds", action="store_true", help="print none: other work ran beside")
    parser.add_argument("--reference", default="qtool:awq+gptq", help="whose KL the others are divided by")
    parser.add_argument("--peer", action="append", default=[], metavar="LIBRARY=PYTHON")
    parser.add_argument("--contenders", nargs="+", default=[], metavar="LIBRARY:METHOD")
    parser.add_argument("--calibration-text")
    parser.add_argument("--evaluation-text")
    parser.add_argument("--scope", choices=["mlp", "linears"], default="mlp")
    parser.add_argument("--scheme", default="int4-g64-asym")
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="also what the results file holds: for timing")
    args = parser.parse_args()
    pythons = {"qtool": sys.executable, **dict(peer.split("=", 1) for peer in args.peer)}
    if not args.report:
        if not (args.checkpoint and args.calibration_text and args.evaluation_text and args.contenders):
            parser.error(
                "wanted CHECKPOINT, --calibration-text, --evaluation-text and --contenders, or --report"
            )
        for contender in args.contenders:
            if contender.partition(":")[0] not in pythons:
                parser.error(f"{contender}: give its python by --peer {contender.partition(':')[0]}=PYTHON")
    return args, pythons


def main() -> None:
    args, pythons = parse()
    succeeded = args.report or measure(args, pythons)
    report(read_runs(args.results), args.reference, as_json=args.json, seconds=not args.no_seconds)
    sys.exit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
