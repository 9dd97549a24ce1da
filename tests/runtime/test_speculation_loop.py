"""Speculation in the engine loop: answers are those without it, and nothing leaks, whatever is drafted."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.runtime.constraint import Bitmask
from qtool.runtime.events import Event, StepDone
from qtool.runtime.loop import EngineLoop, Output
from qtool.runtime.request import RequestOptions, SamplingParams
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.speculation.contract import Drafter
from qtool.runtime.speculation.decide import StepTimes
from qtool.runtime.speculation.ngram import NgramDrafter
from qtool.runtime.speculation.speculator import Speculator
from qtool.runtime.steptime import StepLoad
from tests.runtime.drafters import Guess, ScriptedDrafter, Steady, drawing, knowing, rubbish
from tests.runtime.fake import FakeEngine, greedy
from tests.runtime.test_speculation_verify import bound, chi_square

GREEDY = SamplingParams(max_tokens=12, temperature=0)
ADJUSTING = SamplingParams(
    max_tokens=12,
    temperature=0.8,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.3,
    logit_bias={90: 20.0, 91: 5.0},
    bad_words=((90,), (91, 91)),
    min_tokens=4,
    stop_token_ids=frozenset({91}),
    logprobs=2,
    prompt_logprobs=1,
    seed=3,
)
FLAT = [(StepLoad(rows, rows * rows // 2, 1), 10.0) for rows in (1, 2, 4, 8, 16, 32)]
"""Steps that take the same time whatever they compute, so that drafts always pay."""


class TreeEngine(FakeEngine):
    takes_trees = True


class LoopingEngine(TreeEngine):
    """A model that repeats itself: its logits go by the last two tokens alone, of few."""

    def logits(self, prefix: np.ndarray) -> np.ndarray:
        return super().logits(prefix[-2:] % 4)


def speculator(drafter: Drafter, num_tokens: int | None = 4, *, block: bool = False) -> Speculator:
    return Speculator([drafter], StepTimes(FLAT), 320, num_tokens=num_tokens, block_verification=block)


def run(
    engine: FakeEngine,
    asked: Sequence[tuple[Sequence[int], SamplingParams]],
    speculator: Speculator | None,
    config: SchedulerConfig | None = None,
    options: RequestOptions | None = None,
) -> tuple[list[list[Output]], list[StepDone]]:
    """The outputs of requests that all arrive at once, and the steps that were run."""
    outputs: dict[int, list[Output]] = defaultdict(list)
    events: list[Event] = []
    config = config or SchedulerConfig(8, 64)
    loop = EngineLoop(engine, config, lambda _: None, speculator=speculator)
    loop.observers.append(events.append)
    options = options or RequestOptions()
    ids = [request for prompt, params in asked for request in loop.submit([prompt], params, options)]
    while loop.receive(wait=False):
        for output in loop.step():
            outputs[output.request_id].append(output)
    assert loop.stats().num_free_blocks == engine.num_blocks
    return [outputs[request] for request in ids], [event for event in events if isinstance(event, StepDone)]


def tokens(outputs: Sequence[Sequence[Output]]) -> list[list[int | None]]:
    return [[output.token for output in own] for own in outputs]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, 320, generator.integers(1, 20)).tolist() for _ in range(count)]


def guess_for(kind: str, engine: FakeEngine) -> Guess:
    def answer(text: Sequence[int], count: int) -> list[int]:
        return greedy(engine, list(text), count)

    return {
        "rubbish": rubbish(320),
        "rubbish trees": rubbish(320, trees=True),
        "right": knowing(answer, 320, 1.0),
        "half right": knowing(answer, 320, 0.7),
        "trees": knowing(answer, 320, 0.6, trees=True),
    }[kind]


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["rubbish", "rubbish trees", "right", "half right", "trees"]),
    count=st.integers(1, 7),
    num_blocks=st.integers(8, 30),
    block_size=st.integers(4, 7),
    seqs=st.integers(1, 6),
    spare=st.integers(0, 30),
    n=st.integers(1, 2),
    num_tokens=st.sampled_from([None, 1, 5]),
    data=st.data(),
)
def test_greedy_answers_are_plain_ones_whatever_is_drafted_cancelled_or_preempted(
    kind: str,
    count: int,
    num_blocks: int,
    block_size: int,
    seqs: int,
    spare: int,
    n: int,
    num_tokens: int | None,
    data: st.DataObject,
) -> None:
    engine = TreeEngine(num_blocks, block_size)
    drafter = ScriptedDrafter(guess_for(kind, engine), seed=count)
    loop = EngineLoop(
        engine,
        SchedulerConfig(seqs, seqs + spare),
        lambda _: None,
        speculator=speculator(drafter, num_tokens),
    )
    answers: dict[int, list[int | None]] = defaultdict(list)
    wanted: dict[int, list[int]] = {}

    def step() -> bool:
        going = loop.receive(wait=False)
        for output in loop.step() if going else []:
            answers[output.request_id].append(output.token)
        return going

    for prompt in prompts(count, spare):
        for request in loop.submit([prompt], replace(GREEDY, n=n)):
            wanted[request] = greedy(engine, prompt, 12)
        for _ in range(data.draw(st.integers(0, 4))):
            if loop.scheduler.running and data.draw(st.integers(0, 9)) == 0:
                loop.cancel(cancelled := loop.scheduler.running[-1].id)
                wanted.pop(cancelled, None)
            step()
    while step():
        pass
    assert {request: answers[request] for request in wanted} == wanted
    assert loop.stats().num_free_blocks == num_blocks
    assert drafter.known == set()


def test_right_drafts_save_steps_and_wrong_ones_cost_rows_only() -> None:
    asked = [([5, 6, 7], GREEDY)]
    steps = {}
    for kind in ("right", "rubbish", "trees"):
        engine = TreeEngine()
        found, _ = run(engine, asked, speculator(ScriptedDrafter(guess_for(kind, engine))))
        assert tokens(found) == [greedy(engine, [5, 6, 7], 12)]
        steps[kind] = engine.num_steps
    assert steps["rubbish"] == 12
    assert steps["right"] == 1 + 3  # after the prompt's: 5 tokens, 5, and the last one
    assert steps["right"] < steps["trees"] < steps["rubbish"]


@pytest.mark.parametrize("kind", ["rubbish", "half right", "trees"])
@pytest.mark.parametrize("budget", [64, 9])
def test_seeded_answers_and_their_reports_are_plain_ones_with_every_rule(kind: str, budget: int) -> None:
    asked = [(prompt, replace(ADJUSTING, seed=number)) for number, prompt in enumerate(prompts(10, seed=2))]
    config = SchedulerConfig(4, budget)
    engine = TreeEngine(num_blocks=14)
    plain, _ = run(engine, asked, None, config)

    def answer(text: Sequence[int], count: int) -> list[int]:
        """Of the plain answers, which sampling chose."""
        for (prompt, _), own in zip(asked, tokens(plain), strict=True):
            whole = [*prompt, *own]
            if whole[: len(text)] == list(text):
                return [token or 0 for token in [*whole[len(text) :], *[7] * count][:count]]
        raise AssertionError("a text that no plain answer begins with")

    guesses = {
        "rubbish": rubbish(320),
        "half right": knowing(answer, 320, 0.7),
        "trees": knowing(answer, 320, 0.6, trees=True),
    }
    drafted, steps = run(engine, asked, speculator(ScriptedDrafter(guesses[kind])), config)

    def reports(outputs: Sequence[Sequence[Output]]) -> list[list[Output]]:
        return [
            [replace(one, num_accepted_drafts=0, num_rejected_drafts=0, num_cached_tokens=0) for one in own]
            for own in outputs
        ]

    assert reports(drafted) == reports(plain)
    accepted = sum(sum(step.speculation.accepted) for step in steps if step.speculation is not None)
    assert accepted == sum(own[-1].num_accepted_drafts for own in drafted)
    assert accepted > 10 or kind == "rubbish"


def test_what_was_drafted_is_counted_by_place_and_by_request() -> None:
    engine = TreeEngine()
    drafter = ScriptedDrafter(guess_for("half right", engine))
    (outputs,), steps = run(engine, [([5, 6, 7], GREEDY)], speculator(drafter, 3))
    done = [step.speculation for step in steps if step.speculation is not None and step.speculation.drafted]
    drafted, accepted = Counter[int](), Counter[int]()
    for one in done:
        drafted.update(dict(enumerate(one.drafted)))
        accepted.update(dict(enumerate(one.accepted)))
    assert drafted.total() == drafter.num_proposed
    assert accepted[0] >= accepted[1] >= accepted[2]
    assert outputs[-1].num_accepted_drafts == accepted.total()
    assert outputs[-1].num_rejected_drafts == drafted.total() - accepted.total()
    # Every token but the first comes from a step that decodes, which gives one besides what it accepts.
    assert accepted.total() + sum(step.load.tokens > 0 for step in steps) == 12
    assert all(step.load.tokens == 1 + sum(one.drafted) for step, one in zip(steps[1:], done, strict=False))


class EvenThenEnd:
    """Allows even tokens, and ends after seven of them."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    @property
    def finished(self) -> bool:
        return len(self.accepted) == 7

    def fill_mask(self, row: Bitmask) -> None:
        assert not self.finished
        row[:] = 0x55555555

    def accept(self, token: int) -> None:
        assert token % 2 == 0
        assert not self.finished
        self.accepted.append(token)

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.accepted)
        del self.accepted[len(self.accepted) - num_tokens :]


@pytest.mark.parametrize("kind", ["rubbish", "half right", "trees", "drawn", "drawn block"])
def test_a_constraint_follows_what_is_accepted_and_nothing_else(kind: str) -> None:
    engine = TreeEngine()
    params = replace(GREEDY, temperature=0.0 if "drawn" not in kind else 1.0)
    made: list[EvenThenEnd] = []

    def factory() -> EvenThenEnd:
        made.append(EvenThenEnd())
        return made[-1]

    options = RequestOptions(constraint=factory)
    (plain,), _ = run(engine, [([5, 6], params)], None, options=options)
    true = tokens([plain])[0]

    def answer(text: Sequence[int], count: int) -> list[int]:
        return [token or 0 for token in [*true, *[4] * count][len(text) - 2 :][:count]]

    def even(text: Sequence[int]) -> np.ndarray:
        q = np.exp(engine.logits(np.array(text)))
        return np.asarray(q / q.sum())

    guesses = {
        "rubbish": rubbish(320),
        "half right": knowing(answer, 320, 0.7),
        "trees": knowing(answer, 320, 0.6, trees=True),
    }
    guess = guesses.get(kind, drawing(even))
    using = speculator(ScriptedDrafter(guess), block=kind == "drawn block")
    (outputs,), _ = run(engine, [([5, 6], params)], using, options=options)
    assert made[-1].accepted == tokens([outputs])[0]
    assert outputs[-1].finish_reason == "stop"
    assert len(outputs) == 7
    if "drawn" not in kind:
        assert tokens([outputs])[0] == true


class Panic(BaseException):
    """As a panic in Rust comes to Python: no Exception."""


@pytest.mark.parametrize("call", ["finished", "fill_mask", "accept", "rollback"])
@pytest.mark.parametrize("kind", ["none", "rubbish", "half right", "trees", "drawn block"])
@pytest.mark.parametrize("after", [0, 5])
def test_a_grammar_that_fails_in_any_call_ends_its_own_request_and_no_other(
    call: str, kind: str, after: int
) -> None:
    num_calls = 0

    def fail(self: EvenThenEnd, *arguments: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls > after:
            raise Panic("the grammar is lost")
        method = getattr(EvenThenEnd, call)
        return method.fget(self) if isinstance(method, property) else method(self, *arguments)

    failing = type("Failing", (EvenThenEnd,), {call: property(fail) if call == "finished" else fail})
    engine = TreeEngine()
    params = replace(GREEDY, temperature=1.0 if kind == "drawn block" else 0.0)
    q = np.full(320, 1 / 320)
    using = None
    if kind != "none":
        guess = drawing(lambda _: q) if kind == "drawn block" else guess_for(kind, engine)
        using = speculator(ScriptedDrafter(guess), block=kind == "drawn block")
    outputs: dict[int, list[Output]] = defaultdict(list)
    loop = EngineLoop(engine, SchedulerConfig(8, 64), lambda _: None, speculator=using)
    (bad,) = loop.submit([[5, 6]], params, RequestOptions(constraint=failing))
    (good,) = loop.submit([[7, 8]], GREEDY)
    while loop.receive(wait=False):
        for output in loop.step():
            outputs[output.request_id].append(output)
    assert [output.token for output in outputs[good]] == greedy(engine, [7, 8], 12)
    assert loop.stats().num_free_blocks == engine.num_blocks
    error = outputs[bad][-1].error
    if num_calls > after:  # some of these never take a draft back, or ask less often
        assert "the request's grammar failed: Panic: the grammar is lost" in str(error)
    else:
        assert call in ("rollback", "accept", "finished")
        assert error is None


class SmallEngine(TreeEngine):
    """Five tokens, and logits that go by the last one."""

    def __init__(self) -> None:
        super().__init__(num_blocks=200, vocab_size=5)

    def logits(self, prefix: np.ndarray) -> np.ndarray:
        return np.asarray(np.random.default_rng(int(prefix[-1])).normal(0, 1.5, 5), np.float32)


def bad_q(text: Sequence[int]) -> np.ndarray:
    """A distribution that has nothing to do with the target's."""
    return np.random.default_rng(99 + text[-1]).dirichlet(np.ones(5))


@pytest.mark.parametrize(("width", "block"), [(1, False), (1, True), (2, False)])
@pytest.mark.parametrize("rules", ["none", "top_p and penalties"])
def test_sampled_answers_of_the_loop_are_distributed_as_plain_ones(
    width: int, block: bool, rules: str
) -> None:
    """The first three tokens, all enumerated; the kernels themselves are held to more draws elsewhere."""
    params = SamplingParams(max_tokens=3 * width, n=100)  # a tree is no larger than what may still come
    if rules != "none":
        params = replace(params, top_p=0.9, temperature=0.8, presence_penalty=1.0)
    engine = SmallEngine()
    using = Speculator(
        [ScriptedDrafter(drawing(bad_q, width=width), max_tokens=4)],
        None,
        5,
        num_tokens=4,
        block_verification=block,
    )
    asked = [([2], params)] * 40
    found, steps = run(engine, asked, using, SchedulerConfig(64, 512, max_queue=5000))
    counts = np.zeros(125)
    for answer in tokens(found):
        counts[np.array(answer[:3]) @ [25, 5, 1]] += 1
    assert counts.sum() == 4000
    assert sum(sum(step.speculation.accepted) for step in steps if step.speculation is not None) > 500
    expected = np.zeros(125)
    for first, own in enumerate(_distribution(engine, [2], [], params)):
        for second, then in enumerate(_distribution(engine, [2, first], [first], params)):
            for third, last in enumerate(_distribution(engine, [2, first, second], [first, second], params)):
                expected[25 * first + 5 * second + third] = own * then * last
    cells = int((expected * 4000 >= 10).sum())
    assert chi_square(counts, expected) < bound(cells)


def _distribution(
    engine: FakeEngine, text: Sequence[int], generated: Sequence[int], params: SamplingParams
) -> np.ndarray:
    """By the book: penalty, temperature, softmax, nucleus."""
    logits = engine.logits(np.array(text)).astype(np.float64)
    logits[list(set(generated))] -= params.presence_penalty
    probs = np.exp(logits / params.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs)
    before = np.cumsum(probs[order]) - probs[order]
    probs[order[before >= params.top_p]] = 0
    return np.asarray(probs / probs.sum())


def test_copied_text_of_a_model_that_repeats_itself_is_accepted() -> None:
    engine = LoopingEngine()
    params = SamplingParams(max_tokens=60, temperature=0)
    wanted = greedy(engine, [5, 6, 7], 60)
    found, steps = run(engine, [([5, 6, 7], params)], Speculator([NgramDrafter()], Steady(FLAT), 320))
    assert tokens(found) == [wanted]
    assert len(steps) < 30


def test_no_drafts_are_verified_where_steps_cost_more_than_they_bring() -> None:
    steep = [(StepLoad(rows, rows * rows // 2, 1), 10.0 * rows) for rows in (1, 2, 4, 8, 16, 32)]
    engine = TreeEngine()
    using = Speculator([ScriptedDrafter(guess_for("half right", engine))], Steady(steep), 320)
    found, steps = run(engine, [([5, 6, 7], GREEDY)], using)
    assert tokens(found) == [greedy(engine, [5, 6, 7], 12)]
    assert all(step.load.tokens == 1 for step in steps[1:])
