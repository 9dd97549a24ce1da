"""What speculation brings on given prompts: requests served by a loop of their own, and counted."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from qtool.errors import QtoolError
from qtool.runtime.engines.contract import Engine
from qtool.runtime.events import DraftLength, Event, SequenceDone
from qtool.runtime.loop import EngineLoop
from qtool.runtime.request import SamplingParams
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.speculation.speculator import Speculator


@dataclass
class Measured:
    """What serving some requests took."""

    answers: list[list[int]] = field(default_factory=list)
    """Tokens, by request."""
    ttft_ms: list[float] = field(default_factory=list)
    """From a request's first step to its first token: how long it waits for those before it is their pace."""
    tpot_ms: list[float] = field(default_factory=list)
    """Milliseconds a token after the first, of answers that have one."""
    seconds: float = 0.0
    """In steps, all together."""
    drafting_seconds: float = 0.0
    num_steps: int = 0
    drafted: list[int] = field(default_factory=list)
    """Drafts that were verified, by place."""
    accepted: list[int] = field(default_factory=list)
    lengths: list[DraftLength] = field(default_factory=list)
    """Of every sequence in every step that decoded."""

    @property
    def tokens_per_second(self) -> float:
        """Over all answers, prompts and waiting included."""
        return sum(map(len, self.answers)) / self.seconds

    @property
    def mean_tpot_ms(self) -> float:
        """Over all answers, by token: one decodes as fast as it does, however long it is."""
        weights = [len(answer) - 1 for answer in self.answers if len(answer) > 1]
        total = sum(weight * ms for weight, ms in zip(weights, self.tpot_ms, strict=True))
        return total / max(sum(weights), 1)

    @property
    def acceptance_length(self) -> float:
        """Tokens that a draft gives in a step, with the one that follows; 1 where nothing was drafted."""
        drafted = [length.accepted for length in self.lengths if length.drafted]
        return 1 + sum(drafted) / len(drafted) if drafted else 1.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a sequence gets in a step, with a draft or without."""
        return 1 + sum(length.accepted for length in self.lengths) / max(len(self.lengths), 1)

    @property
    def draft_share(self) -> float:
        """Of the steps of a sequence, how many had a draft."""
        return sum(length.drafted > 0 for length in self.lengths) / max(len(self.lengths), 1)

    def rates(self) -> list[float]:
        """By place, the share of drafts that were accepted."""
        accepted = [*self.accepted, *[0] * (len(self.drafted) - len(self.accepted))]
        return [a / max(d, 1) for a, d in zip(accepted, self.drafted, strict=True)]

    def add(self, event: Event) -> None:
        """Take in what the loop tells."""
        if isinstance(event, SequenceDone):
            self.ttft_ms.append((event.ttft_seconds - event.queue_seconds) * 1000)
            return
        self.num_steps += 1
        self.seconds += event.seconds
        done = event.speculation
        if done is not None:
            self.drafting_seconds += done.drafting_seconds
            self.lengths += done.lengths
            for total, counts in ((self.drafted, done.drafted), (self.accepted, done.accepted)):
                total += [0] * (len(counts) - len(total))
                for place, count in enumerate(counts):
                    total[place] += count


def new_loop(engine: Engine, speculator: Speculator | None, num_prompts: int, batch: int = 1) -> EngineLoop:
    """A loop to measure with, which takes the prompts all at once."""
    config = SchedulerConfig(batch, max(512, batch), prefix_caching=False, max_queue=num_prompts)
    return EngineLoop(engine, config, lambda _: None, speculator=speculator)


def serve_all(
    engine: Engine,
    speculator: Speculator | None,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    batch: int,
    lengths: Sequence[int] | None = None,
) -> Measured:
    """Answer prompts, `batch` at a time, without a prefix cache between them. QtoolError when one fails.

    `lengths` are the answers' largest numbers of tokens, in place of the one of `params`.
    """
    measured = Measured()
    loop = new_loop(engine, speculator, len(prompts), batch)
    loop.observers.append(measured.add)
    times: dict[int, float] = {}

    def keep(event: Event) -> None:
        if isinstance(event, SequenceDone) and event.tpot_seconds is not None:
            times[event.request_id] = event.tpot_seconds * 1000

    loop.observers.append(keep)
    limits = lengths or [params.max_tokens] * len(prompts)
    answers: dict[int, list[int]] = {
        request: []
        for prompt, limit in zip(prompts, limits, strict=True)
        for request in loop.submit([prompt], replace(params, max_tokens=limit))
    }
    while loop.receive(wait=False):
        for output in loop.step():
            if output.token is None:
                raise QtoolError(f"a request failed: {output.error}")
            answers[output.request_id].append(output.token)
    measured.answers = list(answers.values())
    measured.tpot_ms = [times[request] for request in answers if request in times]
    return measured
