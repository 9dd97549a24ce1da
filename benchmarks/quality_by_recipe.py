"""What each recipe costs: quantize a checkpoint by several, judge each against the original.

    python benchmarks/quality_by_recipe.py CHECKPOINT rtn4 awq4 gptq4 --evaluation-text test.txt

Prints a line a recipe: KL(base || quantized), top-1 agreement, perplexity, wall time and peak memory of
quantizing. Each recipe runs in a process of its own, so that peak memory is its own too.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

QTOOL = [sys.executable, "-m", "qtool"]


def run(*arguments: str) -> dict[str, object]:
    """One qtool command; what it prints as JSON."""
    ended = subprocess.run([*QTOOL, *arguments, "--json"], check=True, stdout=subprocess.PIPE)
    result: dict[str, object] = json.loads(ended.stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--calibration-text", help="instead of the recipe's")
    parser.add_argument("--num-samples", help="instead of the recipe's")
    parser.add_argument("--evaluation-text", help="instead of the recipe's")
    parser.add_argument("--num-windows", default="8")
    args = parser.parse_args()
    calibration = ["--dataset", args.calibration_text] if args.calibration_text else []
    calibration += ["--num-samples", args.num_samples] if args.num_samples else []
    evaluation = ["--dataset", args.evaluation_text] if args.evaluation_text else []
    print("recipe           KL mean   KL p99    top-1   perplexity       seconds   peak GiB")
    for recipe in args.recipes:
        with tempfile.TemporaryDirectory() as folder:
            out = str(Path(folder) / "out")
            made = run("quantize", args.checkpoint, "--recipe", recipe, "-o", out, *calibration)
            judged = run(
                *("eval", out, "--baseline", args.checkpoint, "--num-windows", args.num_windows), *evaluation
            )
        drift = judged["drift"]
        assert isinstance(drift, dict)
        print(
            f"{recipe:16} {drift['kl_mean']:.4f}   {drift['kl_p99']:.4f}   {drift['top1_agreement']:.2%}   "
            f"{drift['perplexity_base']:.2f} -> {drift['perplexity']:.2f}   {made['seconds']:7.0f}   "
            f"{float(str(made['peak_memory_bytes'])) / 2**30:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
