"""Whether a server keeps the time between tokens that it promises, whatever arrives.

    python benchmarks/slo_under_load.py --engine ENGINE --tpot-ms 150 --text test.txt --tokenizer CHECKPOINT

Requests arrive at random (Poisson), at rates that are stepped past what the machine can serve. All are
admitted, and wait as long as it takes; what is promised is the time between the tokens of those that run.
Without a promise (--tpot-ms 0) the same load shows what the server does on its own.
"""

import argparse
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from load import Request, Stream, run_load
from serve_vs_peers import Prompts, started


def percentile(values: Sequence[float], share: float) -> float:
    """The value that a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Times of a Poisson process."""
    generator, times, now = random.Random(seed), [], 0.0
    while (now := now + generator.expovariate(rate)) < seconds:
        times.append(now)
    return times


def report(rate: float, streams: Sequence[Stream]) -> None:
    tpot = [1e3 * stream.tpot for stream in streams]
    ttft = statistics.median(stream.ttft for stream in streams)
    last = max(stream.arrivals[-1] for stream in streams)
    tokens = sum(stream.num_tokens for stream in streams) / last
    print(
        f"{rate:6.1f} requests/s: {len(streams):4} requests in {last:5.0f} s, {tokens:6.1f} tokens/s, "
        f"TPOT {percentile(tpot, 0.5):6.1f} ms p50, {percentile(tpot, 0.95):6.1f} ms p95, "
        f"TTFT {ttft:5.2f} s p50",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", required=True)
    parser.add_argument("--tpot-ms", type=float, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1, 2, 4], help="requests a second")
    parser.add_argument("--seconds", type=float, default=15, help="for which requests arrive at each rate")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--options", default="--threads 2", help="more of qtool serve's")
    args = parser.parse_args()
    prompts = Prompts(args.text, args.tokenizer)
    promise = f"--slo tpot={args.tpot_ms}ms" if args.tpot_ms else ""
    command = f"qtool serve {args.engine} --port {{port}} {promise} {args.options}"
    with started("qtool", command) as server:
        run_load(server.port, server.model, [Request(prompts.take(args.prompt), 4)])
        for rate in args.rates:
            times = arrivals(rate, args.seconds, seed=round(rate * 1000))
            requests = [Request(prompts.take(args.prompt), args.tokens, time) for time in times]
            report(rate, run_load(server.port, server.model, requests))


if __name__ == "__main__":
    main()
