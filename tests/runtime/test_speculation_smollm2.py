"""Speculation over the real model and its OpenVINO engine: the same answers, and accepted drafts."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from qtool.compile.build import compile_engine
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Engine, Floats, Step
from qtool.runtime.request import RequestOptions, SamplingParams
from qtool.runtime.sampling import distribution
from qtool.runtime.speculation.decide import StepTimes
from qtool.runtime.speculation.draft_model import DraftModel
from qtool.runtime.speculation.measure import serve_all
from qtool.runtime.speculation.ngram import NgramDrafter
from qtool.runtime.speculation.speculator import Speculator
from qtool.runtime.speculation.verify import draw
from qtool.runtime.structured import grammar
from qtool.runtime.structured.compiler import GrammarCompiler
from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.test_speculation_loop import FLAT, run, tokens
from tests.runtime.test_speculation_verify import bound, chi_square

QUESTIONS = [
    "Repeat this exactly, twice: 'def area(width, height): return width * height'",
    "Count from one to twenty in words.",
    "Why is the sky blue?",
]
TEXT = (
    "The library was quiet in the morning. Rain ran down the tall windows, and the two librarians sorted "
    "returned books into long wooden trays while an old clock above the door counted the minutes."
)
CONTEXTS = 20
DRAWS = 100_000


@pytest.fixture(scope="module")
def engine(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("engines") / "smollm2"
    compile_engine(smollm2, "openvino", folder)
    return open_engine(folder, kv_cache_tokens=2048, threads=2)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


def test_greedy_answers_to_real_prompts_are_the_same_and_copied_text_is_accepted(
    engine: Engine, tokenizer: Tokenizer
) -> None:
    asked = [tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    params = SamplingParams(max_tokens=24, temperature=0, stop_token_ids=tokenizer.eos_token_ids)
    using = Speculator([NgramDrafter()], StepTimes(FLAT), engine.vocab_size, num_tokens=4)
    plain = serve_all(engine, None, asked, params, 3)
    drafted = serve_all(engine, using, asked, params, 3)
    assert drafted.answers == plain.answers
    assert sum(drafted.accepted) >= 10


def test_an_answer_that_a_schema_shapes_is_the_same_with_drafts(engine: Engine, tokenizer: Tokenizer) -> None:
    """A greedy one, and a seeded one whose draft model is the target itself."""
    item = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "size": {"type": "integer"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    schema = {"type": "array", "items": item, "minItems": 3, "maxItems": 3}
    factory = GrammarCompiler(tokenizer, engine.vocab_size).compile(grammar.json_schema("schema", schema))
    options = RequestOptions(constraint=factory)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Three fruits with sizes as JSON."}])
    params = SamplingParams(max_tokens=40, temperature=0, stop_token_ids=tokenizer.eos_token_ids)
    seeded = replace(params, temperature=0.7, seed=1)
    drafter = DraftModel(engine_like(engine), StepTimes(FLAT), engine.vocab_size)
    for using, asked, least in ((NgramDrafter(), params, 5), (drafter, seeded, 10)):
        speculator = Speculator([using], StepTimes(FLAT), engine.vocab_size, num_tokens=4)
        plain, _ = run(engine, [(prompt, asked)], None, options=options)
        drafted, _ = run(engine, [(prompt, asked)], speculator, options=options)
        assert tokens(drafted) == tokens(plain)
        assert drafted[0][-1].num_accepted_drafts >= least


def engine_like(engine: Engine) -> Engine:
    """The same model over a pool of its own: the upper half of the blocks."""
    return _UpperHalf(engine)


class _UpperHalf:
    hidden_states = None
    takes_trees = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.vocab_size, self.max_context = engine.vocab_size, engine.max_context
        self.block_size, self.num_blocks = engine.block_size, engine.num_blocks // 2

    def run(self, step: Step) -> Floats:
        tables = [[block + self.num_blocks for block in table] for table in step.block_tables]
        return self._engine.run(replace(step, block_tables=tables))


def test_real_next_tokens_are_distributed_as_without_drafts(engine: Engine, tokenizer: Tokenizer) -> None:
    """Twenty contexts, drafts drawn from what the model gives at half the precision of a good draft model:
    its logits with noise and another temperature; a q that was not drawn from is seen."""
    ids = tokenizer.encode(TEXT)
    step = Step(
        np.array(ids, np.int32),
        np.arange(len(ids), dtype=np.int32),
        np.zeros(1, np.int32),
        np.array([len(ids)], np.int32),
        [list(range(-(-len(ids) // engine.block_size)))],
        np.arange(len(ids) - CONTEXTS, len(ids), dtype=np.int32),
    )
    generator = np.random.default_rng(0)
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=40)
    untrue = 0.0
    for row in engine.run(step):
        noisy = (row + generator.normal(0, 0.5, len(row))).astype(np.float32)
        p, q = (
            distribution(row, params).probs(),
            distribution(noisy, replace(params, temperature=1.2)).probs(),
        )
        support = np.flatnonzero((p > 0) | (q > 0))
        p, q = p[support].astype(np.float64), q[support].astype(np.float64)
        p, q = p / p.sum(), q / q.sum()
        drafts = generator.choice(len(q), (DRAWS, 1), p=q)
        uniforms = generator.random((DRAWS, 2))
        shape = (DRAWS, len(p))
        found = np.bincount(
            draw(np.broadcast_to(p, shape), drafts, np.broadcast_to(q, shape), uniforms), minlength=len(p)
        )
        assert chi_square(found, p) < bound(max(np.count_nonzero(p * DRAWS >= 10), 2))
        assert np.abs(found / DRAWS - p).sum() / 2 < 0.5 * (len(p) / DRAWS) ** 0.5 + 0.005
        wrong = draw(np.broadcast_to(p, shape), drafts, np.broadcast_to(p[::-1], shape), uniforms)
        untrue = max(untrue, np.abs(np.bincount(wrong, minlength=len(p)) / DRAWS - p).sum() / 2)
    assert untrue > 0.1
