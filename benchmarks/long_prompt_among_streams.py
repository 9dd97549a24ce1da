"""What a long prompt does to those who are reading, and what a cached prefix saves.

    python benchmarks/long_prompt_among_streams.py --text test.txt --tokenizer CHECKPOINT \\
        --server paced='qtool serve ENGINE --port {port} --threads 2 --slo tpot=120ms' \\
        --server chunks-512='qtool serve ENGINE --port {port} --threads 2' \\
        --server whole='qtool serve ENGINE --port {port} --threads 2 --max-num-batched-tokens 4096'

Eight streams decode, once by themselves and once while a prompt of 2,048 tokens arrives: the 99th percentile
of the time between their tokens, beside the prompt until its own first token. Then prompts of 512 tokens and
some more, each twice with another end: the time to the first token with the prefix in the cache, as a part of
what it takes without.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from load import Request, Stream, run_load
from serve_vs_peers import Prompts, Server, started
from slo_under_load import percentile

_NUM_STREAMS = 8
_LONG = 2048
_PREFIX = 512
_TAIL = 16


def gap_ms(streams: Sequence[Stream], begin: float = 0.0, end: float = math.inf) -> float:
    """The 99th percentile of the time between tokens, where it overlaps the time from `begin` to `end`; not
    while the streams begin."""
    begin = max(begin, *(stream.arrivals[0] for stream in streams))
    gaps = [
        after - before
        for stream in streams
        for before, after in pairwise(stream.arrivals)
        if after > begin and before < end
    ]
    return 1e3 * percentile(gaps, 0.99)


def streams_of(prompts: Prompts, tokens: int) -> list[Request]:
    return [Request(prompts.take(32), tokens) for _ in range(_NUM_STREAMS)]


def measure_gaps(server: Server, prompts: Prompts, tokens: int, delay: float) -> str:
    alone = gap_ms(run_load(server.port, server.model, streams_of(prompts, tokens)))
    requests = [*streams_of(prompts, tokens), Request(prompts.take(_LONG), 1, delay)]
    *streams, long = run_load(server.port, server.model, requests)
    if long.arrivals[0] > max(stream.arrivals[-1] for stream in streams):
        print(f"    {server.name}: the streams ended before the long prompt did; give them more --tokens")
    beside = gap_ms(streams, long.sent, long.arrivals[0])
    return (
        f"p99 between tokens {alone:7.1f} ms alone, {beside:7.1f} ms beside the long prompt, "
        f"{beside / alone:5.2f} times; its first token after {long.ttft:5.2f} s"
    )


def measure_prefix(server: Server, prompts: Prompts, times: int) -> str:
    without, cached = [], []
    for _ in range(times):
        prefix = prompts.take(_PREFIX)
        for found in (without, cached):
            request = Request(prefix + prompts.take(_TAIL), 1)
            found.append(run_load(server.port, server.model, [request])[0].ttft)
    ratio = statistics.median(now / before for now, before in zip(cached, without, strict=True))
    return (
        f"first token of {_PREFIX} + {_TAIL} tokens after {1e3 * statistics.median(without):7.1f} ms, "
        f"with the prefix cached {1e3 * statistics.median(cached):7.1f} ms, {ratio:5.3f} of it"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--tokens", type=int, default=192, help="of each stream")
    parser.add_argument("--delay", type=float, default=3.0, help="seconds until the long prompt arrives")
    parser.add_argument("--prefixes", type=int, default=5)
    args = parser.parse_args()
    prompts = Prompts(args.text, args.tokenizer)
    for named in args.server:
        with started(*named.split("=", 1)) as server:
            run_load(server.port, server.model, streams_of(prompts, 8))  # once unmeasured
            print(f"{server.name:12} {measure_gaps(server, prompts, args.tokens, args.delay)}", flush=True)
            print(f"{'':12} {measure_prefix(server, prompts, args.prefixes)}", flush=True)


if __name__ == "__main__":
    main()
