"""/v1/embeddings: what the vectors are, that clients read them, and that nothing else changes by them."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.compile.build import compile_engine
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Engine
from qtool.runtime.loop import EngineLoop
from qtool.runtime.request import Pooling, RequestOptions, SamplingParams
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.served import Served, serving

TEXTS = [
    "a tree in the wind",
    "one",
    "a longer text, which takes more than one chunk of the prompt to compute",
]


@pytest.fixture(scope="module")
def served(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served[Engine]]:
    folder = tmp_path_factory.mktemp("embeddings") / "engine"
    compile_engine(tiny, "openvino", folder, hidden_states="1,final")
    engine = open_engine(folder, kv_cache_tokens=512, threads=1)
    with serving(engine, Tokenizer.load(tiny), SchedulerConfig(4, 16)) as running:
        yield running


def expected(tiny: Path, ids: list[int], pooling: Pooling = "mean") -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).model
    with torch.inference_mode():
        hidden = model(torch.tensor([ids])).last_hidden_state[0].numpy()
    vector = hidden.mean(0) if pooling == "mean" else hidden[-1]
    return np.asarray(vector / np.linalg.norm(vector))


def test_the_openai_client_reads_means_of_transformers_hidden_states(
    served: Served[Engine], tiny: Path
) -> None:
    answer = served.openai().embeddings.create(model="model", input=TEXTS)
    ids = [served.client.tokenizer.encode(text) for text in TEXTS]
    assert [each.index for each in answer.data] == [0, 1, 2]
    for each, tokens in zip(answer.data, ids, strict=True):
        assert np.abs(np.array(each.embedding) - expected(tiny, tokens)).max() < 1e-4
    count = sum(map(len, ids))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)
    assert answer.model == "model"


def test_strings_and_token_ids_floats_and_base64_are_the_same_vectors(served: Served[Engine]) -> None:
    ids = served.client.tokenizer.encode(TEXTS[2])
    inputs = [TEXTS[2], [TEXTS[2]], ids, [ids]]
    found = [
        httpx.post(f"{served.url}/v1/embeddings", json={"model": "model", "input": each}).json()
        for each in inputs
    ]
    body = {"model": "model", "input": ids, "encoding_format": "base64"}
    packed = httpx.post(f"{served.url}/v1/embeddings", json=body).json()["data"][0]["embedding"]
    vectors = [each["data"][0]["embedding"] for each in found]
    assert vectors[0] == vectors[1] == vectors[2] == vectors[3]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == vectors[0]
    assert abs(np.linalg.norm(vectors[0]) - 1) < 1e-5


def test_the_last_hidden_state_can_be_asked_for_and_takes_cached_prefixes(
    served: Served[Engine], tiny: Path
) -> None:
    ids = list(range(3, 73))
    for _ in range(2):
        body = {"model": "model", "input": ids, "pooling": "last"}
        vector = httpx.post(f"{served.url}/v1/embeddings", json=body).json()["data"][0]["embedding"]
        assert np.abs(np.array(vector) - expected(tiny, ids, "last")).max() < 1e-4
    assert served.client.loop.stats().num_hit_tokens >= 64


def test_embeddings_and_answers_run_beside_each_other_unchanged(served: Served[Engine]) -> None:
    client = served.openai()

    def embed(text: str) -> list[float]:
        return client.embeddings.create(model="model", input=text).data[0].embedding

    def complete(text: str) -> str:
        return (
            client.completions.create(model="model", prompt=text, max_tokens=12, temperature=0)
            .choices[0]
            .text
        )

    alone = [(embed(text), complete(text)) for text in TEXTS]
    with ThreadPoolExecutor(6) as pool:
        vectors, answers = pool.map(embed, TEXTS), pool.map(complete, TEXTS)
        for (vector, answer), other, text in zip(alone, vectors, answers, strict=True):
            assert np.abs(np.array(vector) - np.array(other)).max() < 1e-4
            assert answer == text
    stats = served.client.loop.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_blocks)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"dimensions": 8}, "dimensions"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": [[320]]}, "input"),
        ({"input": list(range(300))}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"n": 2}, "n"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    body: dict[str, object], said: str, served: Served[Engine]
) -> None:
    answer = httpx.post(f"{served.url}/v1/embeddings", json={"model": "model", "input": "a", **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == said


def test_an_engine_without_hidden_states_says_how_to_compile_one_with(tiny: Path, tmp_path: Path) -> None:
    compile_engine(tiny, "openvino", tmp_path / "engine")
    engine = open_engine(tmp_path / "engine", kv_cache_tokens=64, threads=1)
    with serving(engine, Tokenizer.load(tiny)) as served, pytest.raises(openai.BadRequestError) as refused:
        served.openai().embeddings.create(model="model", input="a")
    assert "compile it with --hidden-states final" in str(refused.value)


def test_a_prompt_that_gave_up_its_blocks_is_pooled_as_if_it_had_not(tiny: Path) -> None:
    """Two long prompts and answers that grow, in a pool that cannot hold them together."""
    engine = open_engine(tiny, kv_cache_tokens=128)
    loop = EngineLoop(engine, SchedulerConfig(3, 5), lambda _: None)
    loop.submit([list(range(26))] * 2, SamplingParams(max_tokens=30, temperature=0))
    ids = list(range(100, 140))
    (pooled,) = loop.submit([ids], SamplingParams(max_tokens=1), RequestOptions(pooling="mean"))
    vectors = []
    while loop.receive(wait=False):
        vectors += [output.embedding for output in loop.step() if output.request_id == pooled]
    assert len(vectors) == 1
    assert np.abs(vectors[0] - expected(tiny, ids)).max() < 1e-4
    assert loop.stats().num_preemptions


def test_an_input_may_be_as_long_as_the_context(served: Served[Engine]) -> None:
    most = served.client.max_tokens_per_sequence
    statuses = [
        httpx.post(
            f"{served.url}/v1/embeddings", json={"model": "model", "input": [5] * count}, timeout=60
        ).status_code
        for count in (most, most + 1)
    ]
    assert statuses == [200, 400]
