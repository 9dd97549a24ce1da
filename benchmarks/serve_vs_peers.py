"""qtool's server beside others, on one machine, in one run.

    python benchmarks/serve_vs_peers.py --text test.txt --tokenizer CHECKPOINT \\
        --server qtool='qtool serve ENGINE --port {port} --threads 2' \\
        --server llama.cpp='llama-server -m MODEL.gguf --port {port} -t 2 -np 32 -c 16384'

The first server is compared with each of the others. Every workload runs on every server in turn, several
rounds of it, so that what else the machine does meets all of them; prompts are new in every round, so that
no prefix cache helps. Printed are each server's median, and the median and spread of the ratios a round.
"""

import argparse
import contextlib
import json
import shlex
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from load import Request, Stream, run_load


@dataclass(frozen=True)
class Workload:
    """Requests, and the figures that are read off their streams."""

    name: str
    num_streams: int
    num_prompt: int
    num_tokens: int
    figures: tuple[str, ...]


FIGURES: dict[str, tuple[str, Callable[[list[Stream], Workload], float]]] = {
    "throughput": ("tokens/s", lambda streams, _: _num_tokens(streams) / _last(streams)),
    "ttft": ("ms, mean", lambda streams, _: 1e3 * statistics.mean(stream.ttft for stream in streams)),
    "tpot": ("ms, mean", lambda streams, _: 1e3 * statistics.mean(stream.tpot for stream in streams)),
    "prefill": ("tokens/s", lambda streams, load: load.num_prompt / streams[0].ttft),
}
WORKLOADS = [
    Workload("1 stream", 1, 128, 64, ("tpot",)),
    Workload("prefill", 1, 1024, 1, ("prefill",)),
    Workload("16 streams", 16, 128, 64, ("throughput", "ttft", "tpot")),
    Workload("32 streams", 32, 128, 64, ("throughput", "ttft", "tpot")),
]


def _num_tokens(streams: list[Stream]) -> int:
    return sum(stream.num_tokens for stream in streams)


def _last(streams: list[Stream]) -> float:
    return max(stream.arrivals[-1] for stream in streams)


@dataclass
class Server:
    """One that runs; `model` is what it calls what it serves."""

    name: str
    port: int
    model: str


@contextlib.contextmanager
def started(name: str, command: str) -> Iterator[Server]:
    """Start a server on a free port, wait until it answers, and end it afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = Path(f"{name}.log").open("wb")  # noqa: SIM115 - it lives as long as the process
    process = subprocess.Popen(shlex.split(command.format(port=port)), stdout=log, stderr=log)
    try:
        yield Server(name, port, _wait(name, port, process))
    finally:
        process.terminate()
        process.wait()


def _wait(name: str, port: int, process: "subprocess.Popen[bytes]") -> str:
    for _ in range(600):
        if process.poll() is not None:
            sys.exit(f"{name} ended with {process.returncode}; its output is in {name}.log")
        with (
            contextlib.suppress(OSError, ValueError, KeyError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as answer,
        ):
            return str(json.load(answer)["data"][0]["id"])
        time.sleep(0.5)
    sys.exit(f"{name} does not answer; its output is in {name}.log")


class Prompts:
    """Pieces of a text as token ids, none twice."""

    def __init__(self, text: Path, tokenizer: Path) -> None:
        from tokenizers import Tokenizer

        self._ids = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text.read_text()).ids
        self._next = 0

    def take(self, length: int) -> tuple[int, ...]:
        if self._next + length > len(self._ids):
            sys.exit("the text is too short for prompts that are all new; take a longer one, or fewer rounds")
        self._next += length
        return tuple(self._ids[self._next - length : self._next])


def measure(server: Server, workload: Workload, prompts: Prompts) -> dict[str, float]:
    """The workload's figures on one server."""
    requests = [
        Request(prompts.take(workload.num_prompt), workload.num_tokens) for _ in range(workload.num_streams)
    ]
    streams = run_load(server.port, server.model, requests)
    return {name: FIGURES[name][1](streams, workload) for name in workload.figures}


def report(workload: Workload, names: list[str], rounds: list[dict[str, dict[str, float]]]) -> None:
    for figure in workload.figures:
        print(f"{workload.name}, {figure} ({FIGURES[figure][0]})")
        for name in names:
            values = [measured[name][figure] for measured in rounds]
            ratios = [measured[names[0]][figure] / measured[name][figure] for measured in rounds]
            line = f"    {name:16} {statistics.median(values):9.1f}"
            if name != names[0]:
                spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
                line += f"    {names[0]} is {statistics.median(ratios):.2f} of it ({spread})"
            print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--workload", action="append", help="all by default", choices=[w.name for w in WORKLOADS]
    )
    args = parser.parse_args()
    prompts = Prompts(args.text, args.tokenizer)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(started(*named.split("=", 1))) for named in args.server]
        for workload in WORKLOADS:
            if args.workload and workload.name not in args.workload:
                continue
            for server in servers:  # once unmeasured: allocations, lazily compiled kernels
                measure(server, workload, prompts)
            rounds = [
                {server.name: measure(server, workload, prompts) for server in servers}
                for _ in range(args.rounds)
            ]
            report(workload, [server.name for server in servers], rounds)


if __name__ == "__main__":
    main()
