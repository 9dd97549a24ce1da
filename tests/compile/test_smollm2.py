"""SmolLM2 with 4-bit MLPs: the OpenVINO engine against the reference engine."""

import pydoc_data.topics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from qtool.compile.build import compile_engine
from qtool.core.schemes import IntScheme
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Engine, Floats
from tests.compile.checkpoints import write_quantized
from tests.compile.steps import Chunk, step_of

WINDOWS, LENGTH = 8, 96


@pytest.fixture(scope="module")
def checkpoint(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Groups of 64, since 128 does not divide 576; a scheme of its own for down_proj."""
    schemes = {
        "gate_proj": IntScheme(4, 64, symmetric=False),
        "up_proj": IntScheme(4, 64, symmetric=False),
        "down_proj": IntScheme(4, 128, symmetric=True),
    }
    return write_quantized(smollm2, tmp_path_factory.mktemp("smollm2") / "model", schemes, torch.float16)


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Engine:
    folder = checkpoint.with_name("engine")
    compile_engine(checkpoint, "openvino", folder)
    return open_engine(folder, kv_cache_tokens=2048)


@pytest.fixture(scope="module")
def windows(checkpoint: Path) -> list[list[int]]:
    text = "".join(pydoc_data.topics.topics[name] for name in ("assignment", "import", "class"))
    ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids
    return [ids[start * LENGTH : (start + 1) * LENGTH] for start in range(WINDOWS)]


def test_the_drift_from_the_reference_is_that_of_rounding(
    engine: Engine, checkpoint: Path, windows: list[list[int]]
) -> None:
    step = step_of(*(Chunk(window, 0, range(3 * i, 3 * i + 3)) for i, window in enumerate(windows)))
    logits = torch.from_numpy(engine.run(step)).log_softmax(-1)
    wanted = torch.from_numpy(open_engine(checkpoint, kv_cache_tokens=2048).run(step)).log_softmax(-1)
    divergence = (wanted.exp() * (wanted - logits)).sum(-1)
    assert float(divergence.mean()) < 1e-3
    assert float((logits.argmax(-1) == wanted.argmax(-1)).float().mean()) >= 0.995


def test_greedy_tokens_are_the_same_alone_in_chunks_and_in_a_batch(
    engine: Engine, windows: list[list[int]]
) -> None:
    prompts = [windows[0][:40], windows[1][:70], windows[2][:11]]
    alone = [generate(engine, [prompt], _at_once)[0] for prompt in prompts]
    assert generate(engine, prompts, _at_once) == alone
    assert generate(engine, prompts, _in_chunks) == alone
    assert len({tuple(tokens) for tokens in alone}) == 3


Prefill = Callable[[Engine, list[int], range], Floats]


def generate(engine: Engine, prompts: list[list[int]], prefill: Prefill, length: int = 16) -> list[list[int]]:
    """Greedy tokens after each prompt, all prompts decoded in one batch."""
    tables = [range(5 * i, 5 * i + 5) for i in range(len(prompts))]
    tokens = [
        [*prompt, int(prefill(engine, prompt, table)[-1].argmax())]
        for prompt, table in zip(prompts, tables, strict=True)
    ]
    for _ in range(length - 1):
        chunks = [Chunk(ids[-1:], len(ids) - 1, table) for ids, table in zip(tokens, tables, strict=True)]
        for ids, row in zip(tokens, engine.run(step_of(*chunks)), strict=True):
            ids.append(int(np.argmax(row)))
    return [ids[len(prompt) :] for ids, prompt in zip(tokens, prompts, strict=True)]


def _at_once(engine: Engine, prompt: list[int], table: range) -> Floats:
    return engine.run(step_of(Chunk(prompt, 0, table)))


def _in_chunks(engine: Engine, prompt: list[int], table: range) -> Floats:
    for past in range(0, len(prompt), 13):
        logits = engine.run(step_of(Chunk(prompt[past : past + 13], past, table)))
    return logits
