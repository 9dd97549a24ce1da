"""What speculation brings: the same requests with and without, in turn, as ratios.

    python benchmarks/speculative.py ENGINE --speculative ngram draft=DRAFT auto --batches 1 4 16 32
    python benchmarks/speculative.py ENGINE --check-greedy 200
    python benchmarks/speculative.py ENGINE --check-seeded 200

For each kind of text (`edit`: code to be written out again with a change; `open`: questions; `random`: tokens
that mean nothing), each batch size and each way to draft: the time a token takes without speculation over the
time with it (median and range of the repeats, each a pair measured back to back), tokens a second with over
without, tokens a step, acceptance length, the share of time spent drafting, and the time to the first token
with over without. With `--check-greedy N` nothing is timed: greedy answers to N prompts are compared, and
where they differ, whether the model's two best logits tied there. With `--check-seeded N` answers that a seed
draws are compared, at temperature 1 if no other is given.

Answers have half to one and a half times `--max-tokens`: were all equally long, they would end together, at
the slowest one's pace, and what drafts save of the others would not show.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from qtool.calibrate.text import load_records
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Engine, Step
from qtool.runtime.request import SamplingParams
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.speculation.build import SpeculationConfig, make_speculator, parse_count, parse_kind
from qtool.runtime.speculation.measure import serve_all
from qtool.runtime.speculation.speculator import Speculator
from qtool.runtime.tokenizer import Tokenizer

TIE = 1e-3
"""Logits nearer than this are a tie: kernels sum in another order where they compute more rows."""

QUESTIONS = (
    "Why is the sky blue?",
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "What is the difference between a list and a tuple in Python?",
    "Give me three tips to sleep better.",
    "How does a refrigerator work?",
    "Describe the water cycle to a child.",
    "What made the Roman roads last so long?",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--speculative", nargs="+", default=["ngram", "auto"])
    parser.add_argument("--speculative-tokens", default="auto")
    parser.add_argument("--speculative-tree", default="auto")
    parser.add_argument("--texts", nargs="+", default=["edit", "open", "random"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--requests", type=int, default=0, help="per run; four times the batch by default")
    parser.add_argument("--threads", type=int)
    check = parser.add_mutually_exclusive_group()
    check.add_argument("--check-greedy", type=int, metavar="N")
    check.add_argument("--check-seeded", type=int, metavar="N")
    args = parser.parse_args()
    engine = open_engine(args.engine, kv_cache_tokens=32_768, threads=args.threads)
    tokenizer = Tokenizer.load(args.engine)
    speculators = {name: _speculator(name, args, engine, tokenizer) for name in args.speculative}
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, stop_token_ids=tokenizer.eos_token_ids
    )
    if count := args.check_greedy or args.check_seeded:
        if args.check_greedy:
            params = replace(params, temperature=0.0)
        else:
            params = replace(params, temperature=args.temperature or 1.0, seed=1)
        for name, speculator in speculators.items():
            found = _check(engine, tokenizer, speculator, params, count)
            print(json.dumps({"speculative": name, **found}), flush=True)
        return
    for text in args.texts:
        for batch in args.batches:
            count = args.requests or max(4 * batch, 8)
            prompts = _prompts(text, count, tokenizer, engine.vocab_size)
            lengths = np.random.default_rng(batch).integers(
                args.max_tokens // 2, 3 * args.max_tokens // 2, count
            )
            for name, speculator in speculators.items():
                found = _compare(engine, speculator, prompts, params, batch, lengths.tolist(), args.repeats)
                print(json.dumps({"text": text, "batch": batch, "speculative": name, **found}), flush=True)


def _speculator(name: str, args: argparse.Namespace, engine: Engine, tokenizer: Tokenizer) -> Speculator:
    kind, where = parse_kind(name)
    config = SpeculationConfig(
        kind,
        where,
        num_tokens=parse_count("speculative_tokens", args.speculative_tokens),
        tree_width=parse_count("speculative_tree", args.speculative_tree),
        threads=args.threads,
    )
    speculator = make_speculator(config, SchedulerConfig(), engine, tokenizer, args.engine)
    assert speculator is not None, "off is what the others are compared with"
    return speculator


def _compare(
    engine: Engine,
    speculator: Speculator,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    batch: int,
    lengths: Sequence[int],
    repeats: int,
) -> dict[str, object]:
    serve_all(engine, speculator, prompts[:batch], params, batch)  # what is learnt stays learnt
    ratios, throughputs, firsts, drafting = [], [], [], []
    for _ in range(repeats):
        plain = serve_all(engine, None, prompts, params, batch, lengths)
        drafted = serve_all(engine, speculator, prompts, params, batch, lengths)
        throughputs.append(drafted.tokens_per_second / plain.tokens_per_second)
        ratios.append(plain.mean_tpot_ms / drafted.mean_tpot_ms)
        firsts.append(statistics.median(drafted.ttft_ms) / statistics.median(plain.ttft_ms))
        drafting.append(drafted.drafting_seconds / drafted.seconds)
    return {
        "speedup": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "throughput": round(statistics.median(throughputs), 3),
        "throughput_range": [round(min(throughputs), 3), round(max(throughputs), 3)],
        "tokens_per_step": round(drafted.tokens_per_step, 2),
        "acceptance_length": round(drafted.acceptance_length, 2),
        "rates": [round(rate, 2) for rate in drafted.rates()],
        "drafting_share": round(statistics.median(drafting), 3),
        "tpot_ms": round(drafted.mean_tpot_ms, 2),
        "ttft_ratio": round(statistics.median(firsts), 3),
    }


def _prompts(text: str, count: int, tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    generator = np.random.default_rng(len(text))
    if text == "random":
        return [generator.integers(10, vocab_size, 64).tolist() for _ in range(count)]
    if text == "open":
        asked = [f"{QUESTIONS[n % len(QUESTIONS)]} ({n})" for n in range(count)]
    elif text == "edit":
        lines = [line for line in Path(__file__).read_text(encoding="utf-8").splitlines() if line.strip()]
        asked = []
        for n in range(count):
            start = int(generator.integers(0, len(lines) - 12))
            code = "\n".join(lines[start : start + 12])
            asked.append(f"Repeat this Python code exactly, but rename `name` to `label_{n}`:\n\n{code}")
    else:
        raise SystemExit(f"--texts: {text!r} is unknown; wanted edit, open or random")
    return [tokenizer.encode_chat([{"role": "user", "content": one}]) for one in asked]


def _check(
    engine: Engine, tokenizer: Tokenizer, speculator: Speculator, params: SamplingParams, count: int
) -> dict[str, object]:
    """Answers with and without, how many differ, and of greedy ones the ties where they part."""
    words = [str(record) for record in load_records("builtin:pydoc-test")]
    asked = [*QUESTIONS, *(f"Explain:\n{words[n % len(words)][:300]}" for n in range(count))][:count]
    prompts = [tokenizer.encode_chat([{"role": "user", "content": one}]) for one in asked]
    plain = serve_all(engine, None, prompts, params, 1)
    drafted = serve_all(engine, speculator, prompts, params, 1)
    pairs = zip(prompts, drafted.answers, plain.answers, strict=True)
    parted = [(prompt, ours, theirs) for prompt, ours, theirs in pairs if ours != theirs]
    found: dict[str, object] = {
        "prompts": count,
        "tokens": sum(map(len, plain.answers)),
        "accepted": sum(drafted.accepted),
        "differing": len(parted),
    }
    if params.temperature:
        return found
    gaps = []
    for prompt, ours, theirs in parted:
        same = next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        gaps.append(_gap(engine, [*prompt, *theirs[:same]]))
    return {**found, "of_which_ties": sum(gap < TIE for gap in gaps), "gaps": gaps}


def _gap(engine: Engine, tokens: Sequence[int]) -> float:
    """Between the two best logits after a text."""
    count = len(tokens)
    step = Step(
        np.array(tokens, np.int32),
        np.arange(count, dtype=np.int32),
        np.zeros(1, np.int32),
        np.array([count], np.int32),
        [list(range(-(-count // engine.block_size)))],
        np.array([count - 1], np.int32),
    )
    best = np.sort(engine.run(step)[0])[-2:]
    return float(best[1] - best[0])


if __name__ == "__main__":
    main()
