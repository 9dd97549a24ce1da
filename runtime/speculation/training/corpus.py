"""The sequences that heads are trained on: windows of text, and the target's own answers to prompts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from qtool.calibrate.text import Record
from qtool.errors import UsageError
from qtool.runtime.engines.contract import Engine
from qtool.runtime.loop import EngineLoop
from qtool.runtime.request import SamplingParams
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.tokenizer import Tokenizer

_PROMPT_SHARE = 4
"""Of a window of text, one part in so many is a prompt where the rest is to be the target's own."""


@dataclass(frozen=True)
class CorpusOptions:
    """How texts become sequences."""

    seq_len: int = 256
    """Tokens of a sequence at most."""
    own_share: float = 0.5
    """Of the windows of running text, how many the target continues by itself. Chats always are."""
    temperature: float = 0.7
    """Of the target's own answers; every other one is greedy."""
    max_sequences: int | None = None
    """Sequences at most, spread evenly over the data; None takes all."""


@dataclass(frozen=True)
class Seed:
    """Where a sequence begins."""

    tokens: tuple[int, ...]
    own: bool
    """Whether the target continues it; else it is complete."""


def read_seeds(tokenizer: Tokenizer, records: Sequence[Record], options: CorpusOptions) -> list[Seed]:
    """The seeds of records, in an order that mixes their kinds; the same ones every time.

    Raises UsageError when the text makes none.
    """
    texts = [record for record in records if isinstance(record, str)]
    ids = [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]
    windows = [ids[start : start + options.seq_len] for start in range(0, len(ids), options.seq_len)]
    seeds = []
    for index, window in enumerate(window for window in windows if len(window) == options.seq_len):
        own = int((index + 1) * options.own_share) > int(index * options.own_share)
        seeds.append(Seed(tuple(window[: options.seq_len // _PROMPT_SHARE] if own else window), own))
    chats = [record for record in records if not isinstance(record, str)]
    asked = [chat[:-1] if chat[-1]["role"] == "assistant" else chat for chat in chats]
    prompts = [tokenizer.encode_chat(questions) for questions in asked]
    most = options.seq_len // 2
    seeds += [Seed(tuple(prompt), own=True) for prompt in prompts if len(prompt) <= most]
    if not seeds:
        shortest = min(map(len, prompts), default=0)
        raise UsageError(
            f"the data makes no sequence of {options.seq_len} tokens: it has {len(ids)} tokens of text"
            + (f", and of {len(prompts)} chats the shortest takes {shortest}" if prompts else "")
            + f"; give more text, or chats of {most} tokens at most"
            + (f", or a --seq-len of {2 * shortest} or more" if prompts else "")
        )
    return _spread(seeds, options.max_sequences)


def _spread(seeds: list[Seed], most: int | None) -> list[Seed]:
    """`most` of the seeds, evenly, those from all over the list side by side."""
    count = len(seeds) if most is None else min(most, len(seeds))
    chosen = [seeds[index * len(seeds) // count] for index in range(count)]
    step = next(step for step in range(max(1, int(0.382 * count)), count + 1) if _coprime(step, count))
    return [chosen[place * step % count] for place in range(count)]


def _coprime(a: int, b: int) -> bool:
    while b:
        a, b = b, a % b
    return a == 1


def complete(
    engine: Engine, seeds: Sequence[Seed], options: CorpusOptions, stop: frozenset[int], number: int
) -> Iterator[tuple[int, ...]]:
    """The sequences that `seeds` become. `number` is the first one's place, by which answers are drawn."""
    answers: dict[int, list[int]] = {}
    loop = EngineLoop(engine, SchedulerConfig(prefix_caching=False), deliver=lambda outputs: None)
    ids: dict[int, int] = {}
    for place, seed in enumerate(seeds):
        if not seed.own:
            continue
        params = SamplingParams(
            max_tokens=options.seq_len - len(seed.tokens), temperature=0.0, stop_token_ids=stop
        )
        if (number + place) % 2:
            params = replace(params, temperature=options.temperature, seed=number + place)
        ids[loop.submit([seed.tokens], params)[0]] = place
        answers[place] = []
    while loop.receive(wait=False):
        for output in loop.step():
            if output.error is not None:
                raise output.error
            if output.token is not None:
                answers[ids[output.request_id]].append(output.token)
    for place, seed in enumerate(seeds):
        yield (*seed.tokens, *answers.get(place, ()))
