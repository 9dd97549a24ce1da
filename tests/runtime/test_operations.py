"""What operators rely on: metrics, probes, keys, limits, request ids and logs."""

import json
import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import qtool
from qtool.errors import UsageError
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.server.logs import JsonFormatter
from qtool.runtime.server.settings import ServerSettings, read_api_keys
from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.fake import FakeEngine
from tests.runtime.served import Served, serving

NAMES = {
    "qtool_time_to_first_token_seconds": "histogram",
    "qtool_time_per_output_token_seconds": "histogram",
    "qtool_request_duration_seconds": "histogram",
    "qtool_requests_running": "gauge",
    "qtool_requests_waiting": "gauge",
    "qtool_kv_cache_usage_ratio": "gauge",
    "qtool_preemptions_total": "counter",
    "qtool_prefix_cache_hit_tokens_total": "counter",
    "qtool_prefix_cache_query_tokens_total": "counter",
    "qtool_queue_time_seconds": "histogram",
    "qtool_step_seconds": "histogram",
    "qtool_requests_refused_total": "counter",
    "qtool_prompt_tokens_total": "counter",
    "qtool_generation_tokens_total": "counter",
    "qtool_requests_total": "counter",
    "qtool_draft_tokens_total": "counter",
    "qtool_accepted_tokens_total": "counter",
    "qtool_draft_position_tokens_total": "counter",
    "qtool_accepted_position_tokens_total": "counter",
    "qtool_drafting_seconds_total": "counter",
    "qtool_draft_length_tokens": "histogram",
    "qtool_acceptance_length_tokens": "histogram",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
}
"""Frozen: a dashboard somewhere reads each of them. Add names, never change one."""

COMPLETION = {"model": "model", "prompt": "Once", "max_tokens": 5, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(byte_tokenizer: Tokenizer) -> Iterator[Served[FakeEngine]]:
    with serving(FakeEngine(num_blocks=64), byte_tokenizer) as found:
        yield found


def samples(served: Served[FakeEngine]) -> dict[str, float]:
    """The values on the metrics page, by name and labels."""
    found = {}
    for line in httpx.get(f"{served.url}/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def test_metric_names_and_types_are_frozen(served: Served[FakeEngine]) -> None:
    page = httpx.get(f"{served.url}/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page.text, re.MULTILINE))
    assert {name: kind for name, kind in found.items() if not name.endswith("_created")} == NAMES


@pytest.mark.parametrize("stream", [False, True])
def test_metrics_count_what_was_served(stream: bool, byte_tokenizer: Tokenizer) -> None:
    engine = FakeEngine(num_blocks=64)
    engine.seconds_a_step = 0.01
    with serving(engine, byte_tokenizer) as served:
        body = {**COMPLETION, "prompt": ["Once", "Twice or"], "stream": stream}
        assert httpx.post(f"{served.url}/v1/completions", json=body).status_code == 200
        found = samples(served)
    assert found["qtool_generation_tokens_total"] == 10
    assert found["qtool_prompt_tokens_total"] == sum(
        len(byte_tokenizer.encode(prompt)) for prompt in ("Once", "Twice or")
    )
    assert found["qtool_time_to_first_token_seconds_count"] == 2
    assert found["qtool_request_duration_seconds_count"] == 2
    assert found["qtool_time_per_output_token_seconds_count"] == 2
    # Five steps of 10 ms or more each; how much more depends on the machine.
    assert found["qtool_time_to_first_token_seconds_sum"] >= 2 * 0.01
    assert found["qtool_time_per_output_token_seconds_sum"] >= 2 * 0.01
    assert found["qtool_request_duration_seconds_sum"] >= 2 * 0.05
    assert found["qtool_queue_time_seconds_count"] == 2
    assert found["qtool_step_seconds_count"] == engine.num_steps
    assert found["qtool_step_seconds_sum"] >= 0.05
    assert found['qtool_requests_total{route="/v1/completions",status="200"}'] == 1


def test_a_preempted_answers_time_between_tokens_holds_its_pause(byte_tokenizer: Tokenizer) -> None:
    engine = FakeEngine(num_blocks=12)
    engine.seconds_a_step = 0.002
    with serving(engine, byte_tokenizer) as served:
        body = {**COMPLETION, "prompt": ["Once", "More", "Than"], "max_tokens": 21}
        assert httpx.post(f"{served.url}/v1/completions", json=body, timeout=60).status_code == 200
        found = samples(served)
    assert found["qtool_preemptions_total"] > 0
    begun, ended, between = (
        found[f"qtool_{name}_seconds_sum"]
        for name in ("time_to_first_token", "request_duration", "time_per_output_token")
    )
    # From the first token to the last, whatever came between: 20 gaps in each of the three answers.
    assert between * 20 == pytest.approx(ended - begun, rel=0.05)
    assert between > 3 * 0.002 * 21 / 20


def test_gauges_show_what_runs_and_what_waits(byte_tokenizer: Tokenizer) -> None:
    engine = FakeEngine(num_blocks=64)
    engine.seconds_a_step = 0.02
    with serving(engine, byte_tokenizer) as served, ThreadPoolExecutor() as pool:
        body = {**COMPLETION, "prompt": [f"{number}" for number in range(10)], "max_tokens": 25}
        asking = pool.submit(httpx.post, f"{served.url}/v1/completions", json=body, timeout=60)
        while (found := samples(served))["qtool_requests_waiting"] == 0:
            assert not asking.done()
    assert found["qtool_requests_running"] == found["vllm:num_requests_running"] == 8
    assert found["qtool_requests_waiting"] == found["vllm:num_requests_waiting"] == 2
    assert found["qtool_kv_cache_usage_ratio"] == found["vllm:kv_cache_usage_perc"] > 0


def test_probes_and_version_answer(served: Served[FakeEngine]) -> None:
    assert httpx.get(f"{served.url}/ready").json() == {"status": "ready"}
    assert httpx.get(f"{served.url}/version").json() == {"version": qtool.__version__}


def test_the_page_reads_only_metrics_that_are_there_and_nothing_from_elsewhere(
    served: Served[FakeEngine],
) -> None:
    page = httpx.get(f"{served.url}/")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.search(r"(src|href)=.(https?:)?//", page.text)
    histograms = {name for name, kind in NAMES.items() if kind == "histogram"}
    series = NAMES.keys() | {f"{name}_{part}" for name in histograms for part in ("sum", "count")}
    read = set(re.findall(r'"(qtool_\w+)"', page.text))
    assert read <= series
    assert {"qtool_requests_running", "qtool_kv_cache_usage_ratio", "qtool_accepted_tokens_total"} <= read


def test_the_page_calls_only_routes_that_are_there(served: Served[FakeEngine]) -> None:
    page = httpx.get(f"{served.url}/").text
    paths = set(re.findall(r'fetch\("([^"]+)"', page)) | set(re.findall(r'href="(/[^"]*)"', page))
    assert {"/metrics", "/ready", "/v1/models", "/v1/chat/completions"} <= paths
    for path in paths:
        assert httpx.get(served.url + path).status_code == (405 if path == "/v1/chat/completions" else 200)
    asked = re.search(r"JSON.stringify\(\{ model: await model\(\), messages: chat, (.+?) \}\)", page)
    assert asked is not None
    fields = json.loads("{" + re.sub(r"(\w+):", r'"\1":', asked[1]) + "}")
    chat = {"model": "model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, **fields}
    lines = httpx.post(f"{served.url}/v1/chat/completions", json=chat).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert all(chunk["choices"] == [] or "delta" in chunk["choices"][0] for chunk in chunks)
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_the_dashboard_reads_only_metrics_that_are_there() -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    read = {
        name.removesuffix("_bucket")
        for panel in dashboard["panels"]
        for target in panel["targets"]
        for name in re.findall(r"qtool_\w+", target["expr"])
    }
    histograms = {name for name, kind in NAMES.items() if kind == "histogram"}
    parts = {f"{name}_{part}" for name in histograms for part in ("sum", "count")}
    assert read <= NAMES.keys() | parts
    drafts = ("draft_tokens_total", "accepted_tokens_total", "drafting_seconds_total")
    lengths = ("draft_length_tokens_sum", "acceptance_length_tokens_sum")
    assert {f"qtool_{name}" for name in (*drafts, *lengths)} <= read


def test_a_full_queue_is_refused_at_once_and_shows(byte_tokenizer: Tokenizer) -> None:
    engine = FakeEngine(num_blocks=64)
    engine.seconds_a_step = 0.02
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_queue=1)
    with serving(engine, byte_tokenizer, config) as served, ThreadPoolExecutor() as pool:
        url = f"{served.url}/v1/completions"
        body = {**COMPLETION, "prompt": ["a", "b", "c"], "max_tokens": 60}
        asking = pool.submit(httpx.post, url, json=body, timeout=60)
        while httpx.get(f"{served.url}/ready").status_code == 200:
            assert not asking.done()
        assert httpx.get(f"{served.url}/health").status_code == 200
        engine.gate.clear()  # the queue stays full, and a step under way delays no refusal
        seconds = []
        with httpx.Client() as client:
            for _ in range(40):
                refused = client.post(url, json=COMPLETION)
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) >= 1
                seconds.append(refused.elapsed.total_seconds())
        engine.gate.set()
        # The quickest: what else the machine does is not the server's. On a quiet one the median is too.
        assert min(seconds) < 0.05
        assert samples(served)["qtool_requests_refused_total"] == 40
        assert asking.result().status_code == 200


def test_one_request_may_not_take_all_the_room(byte_tokenizer: Tokenizer) -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_queue=4)
    with serving(FakeEngine(num_blocks=64), byte_tokenizer, config) as served:
        url = f"{served.url}/v1/completions"
        assert httpx.post(url, json={**COMPLETION, "prompt": ["a", "b"], "n": 2}).status_code == 200
        for param, body in (("prompt", {"prompt": ["a"] * 5}), ("n", {"prompt": ["a"], "n": 5})):
            refused = httpx.post(url, json={**COMPLETION, **body})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param
            assert "5 answers at once, and one request may ask for 4" in refused.json()["error"]["message"]
        assert samples(served)["qtool_requests_refused_total"] == 0  # not for load: it can never be taken


def test_a_server_that_drains_is_not_ready(byte_tokenizer: Tokenizer) -> None:
    with serving(FakeEngine(), byte_tokenizer) as served:
        served.client.loop.drain()
        assert httpx.get(f"{served.url}/ready").status_code == 503
        refused = httpx.post(f"{served.url}/v1/completions", json=COMPLETION)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")


def test_tokenize_and_detokenize_are_each_others_inverse(
    served: Served[FakeEngine], byte_tokenizer: Tokenizer
) -> None:
    text = "Grüße 🙂 <|im_end|>"
    made = httpx.post(f"{served.url}/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert made["tokens"] == byte_tokenizer.encode(text)
    assert (made["count"], made["max_model_len"]) == (len(made["tokens"]), 256)
    assert made["token_strs"][-1] == "<|im_end|>"
    back = httpx.post(f"{served.url}/detokenize", json={"model": "model", "tokens": made["tokens"]})
    assert back.json() == {"prompt": text}


def test_a_chat_is_tokenized_through_its_template(
    served: Served[FakeEngine], byte_tokenizer: Tokenizer
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    made = httpx.post(f"{served.url}/tokenize", json={"messages": messages}).json()
    assert made["tokens"] == byte_tokenizer.encode_chat(messages)
    assert made["token_strs"] is None


def test_tokenizer_info_names_special_tokens_and_the_template(served: Served[FakeEngine]) -> None:
    info = httpx.get(f"{served.url}/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "message['role']" in info["chat_template"]
    assert info["model_max_length"] == 256


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("tokenize", {}, 400, "prompt"),
        ("tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
        ("tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("detokenize", {"tokens": [320]}, 400, "tokens"),
        ("detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("detokenize", {"tokens": "x"}, 400, "tokens"),
    ],
)
def test_tokenization_refuses_what_cannot_be(
    path: str, body: dict[str, object], status: int, param: str, served: Served[FakeEngine]
) -> None:
    response = httpx.post(f"{served.url}/{path}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_every_response_has_the_request_id_that_came_or_a_new_one(served: Served[FakeEngine]) -> None:
    def sent_back(given: str) -> str:
        headers = {"X-Request-Id": given}
        return httpx.post(f"{served.url}/v1/completions", json={}, headers=headers).headers["x-request-id"]

    assert sent_back("abc-1") == "abc-1"
    new = {sent_back(given) for given in ("", "two words", "x" * 129)}
    assert len(new) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", given) for given in new)


def test_one_of_several_keys_is_wanted_but_not_by_probes(byte_tokenizer: Tokenizer) -> None:
    settings = ServerSettings(api_keys=frozenset({"first", "second"}))
    with serving(FakeEngine(), byte_tokenizer, settings=settings) as served:
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert httpx.get(served.url + path).status_code == 200
        for key, status in (
            ("Bearer first", 200),
            ("bearer second", 200),
            ("Bearer firs", 401),
            ("Bearer", 401),
            ("Basic first", 401),
            ("first", 401),
        ):
            for path in ("/v1/models", "/tokenizer_info"):
                response = httpx.get(served.url + path, headers={"Authorization": key})
                assert response.status_code == status, key
        refused = httpx.post(f"{served.url}/v1/completions", json=COMPLETION)
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "invalid_request_error"
        assert refused.headers["x-request-id"]


def test_a_body_beyond_the_limit_is_413_told_or_not(byte_tokenizer: Tokenizer) -> None:
    settings = ServerSettings(max_body_bytes=1000)
    with serving(FakeEngine(), byte_tokenizer, settings=settings) as served:
        url = f"{served.url}/v1/completions"

        def chunks() -> Iterator[bytes]:
            for _ in range(30):
                yield b"x" * 100

        for content in (b"x" * 1001, chunks()):
            response = httpx.post(url, content=content, headers={"content-type": "application/json"})
            assert response.status_code == 413
            assert "larger than 1000 bytes" in response.json()["error"]["message"]
        assert httpx.post(url, json=COMPLETION).status_code == 200


def test_pages_of_other_origins_may_call_only_when_allowed(byte_tokenizer: Tokenizer) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    allowed = ServerSettings(allow_origins=("https://a.example",), api_keys=frozenset({"key"}))
    with serving(FakeEngine(), byte_tokenizer, settings=allowed) as served:
        response = httpx.options(f"{served.url}/v1/models", headers=asked)
        assert response.headers["access-control-allow-origin"] == "https://a.example"
        other = {**asked, "Origin": "https://b.example"}
        assert "access-control-allow-origin" not in httpx.options(served.url, headers=other).headers
    with serving(FakeEngine(), byte_tokenizer) as served:
        response = httpx.get(f"{served.url}/v1/models", headers=asked)
        assert "access-control-allow-origin" not in response.headers


def test_a_request_is_one_line_of_json_in_the_log(
    served: Served[FakeEngine], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "qtool.access"):
        headers = {"X-Request-Id": "abc"}
        httpx.post(f"{served.url}/v1/completions", json=COMPLETION, headers=headers)
    (record,) = [record for record in caplog.records if record.name == "qtool.access"]
    line = json.loads(JsonFormatter().format(record))
    assert line.pop("time").endswith("+00:00")
    assert 0 < line.pop("ttft_seconds") <= line.pop("seconds")
    assert line == {
        "level": "info",
        "logger": "qtool.access",
        "message": "request",
        "request_id": "abc",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "prompt_tokens": len(served.client.tokenizer.encode("Once")),
        "max_tokens": 5,
        "temperature": 1.0,
        "completion_tokens": 5,
        "cached_tokens": 0,
        "finish_reasons": ["length"],
    }


def test_key_files_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# for tests\nfirst\n\n  second \n")
    assert read_api_keys(path) == {"first", "second"}
    for content in ("", "# none\n", "two words\n", "schlüssel\n"):
        path.write_text(content)
        with pytest.raises(UsageError, match="key"):
            read_api_keys(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_api_keys(tmp_path / "nowhere")
