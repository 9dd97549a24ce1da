"""`qtool batch`: OpenAI's batch files, answered as the server would, and resumed after an interruption."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.test_run_and_serve import qtool


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    request = {"model": "tiny", "max_tokens": 5, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": route, "body": request}


LINES = [
    line("chat", messages=[{"role": "user", "content": "Hi"}]),
    line("text", prompt=["Once", "Twice"], n=2),
    line("wrong", prompt="x", max_tokenz=3),
    line("typed", prompt="x", temperature="hot"),
    line("other", prompt="x", model="other"),
    line("streamed", prompt="x", stream=True),
    line("grammar", prompt="x", guided_choice=["yes"]),
]


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def read(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line["response"] for line in found}


def test_every_request_gets_its_response(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    command = ["batch", str(tiny), str(source), str(target), "--served-model-name", "tiny"]
    assert qtool(*command) == 1
    assert "7 responses, 7 of them made now, 4 of them errors" in capsys.readouterr().out
    found = read(target)
    assert found["chat"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert [choice["index"] for choice in found["text"]["body"]["choices"]] == [0, 1, 2, 3]
    assert found["grammar"]["body"]["choices"][0]["text"] == "yes"
    status = {custom_id: response["status_code"] for custom_id, response in found.items()}
    assert status == {
        "chat": 200,
        "text": 200,
        "wrong": 400,
        "typed": 400,
        "other": 404,
        "streamed": 400,
        "grammar": 200,
    }
    assert found["typed"]["body"]["error"]["param"] == "temperature"
    assert qtool(*command) == 2
    assert "exists already" in capsys.readouterr().err
    command[2:4] = [str(write(tmp_path / "right.jsonl", LINES[:2])), str(tmp_path / "answers.jsonl")]
    assert qtool(*command) == 0
    assert "2 responses, 2 of them made now, 0 of them errors" in capsys.readouterr().out


def test_a_batch_goes_on_where_it_was_interrupted(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = write(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    done = json.dumps({"custom_id": "chat", "response": {"status_code": 200, "body": "kept"}})
    (tmp_path / "out.jsonl.partial").write_text(done + '\n{"custom_id": "te')
    assert qtool("batch", str(tiny), str(source), str(target), "--served-model-name", "tiny") == 1
    assert "7 responses, 6 of them made now, 4 of them errors" in capsys.readouterr().out
    found = read(target)
    assert found["chat"]["body"] == "kept"
    assert len(found) == 7
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_other_line_ends_within_a_request_or_a_response_end_no_line(tiny: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked = [line("old", prompt="a\u2028b"), line("new", prompt="c\u2028d\x85")]
    source.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in asked))
    done = {"custom_id": "old", "response": {"status_code": 200, "body": "x\u2028y"}}
    (tmp_path / "out.jsonl.partial").write_text(json.dumps(done, ensure_ascii=False) + "\n")
    assert qtool("batch", str(tiny), str(source), str(target), "--served-model-name", "tiny") == 0
    found = [json.loads(one) for one in target.read_bytes().splitlines()]
    assert [(one["custom_id"], one["response"]["status_code"]) for one in found] == [
        ("old", 200),
        ("new", 200),
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"custom_id": "a"', "in.jsonl:1: is not valid JSON"),
        ('{"method": "POST"}', "in.jsonl:1: has no custom_id"),
        ('\n{"custom_id": "a", "method": "GET", "url": "/v1/completions"}', "in.jsonl:2: asks for GET"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/chat"}', "asks for POST /v1/chat, wanted POST"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions"}', "has no body"),
        ("\n".join([json.dumps(line("a", prompt="x"))] * 2), "'a' is given 2 times"),
    ],
)
def test_a_file_that_is_no_batch_is_refused_before_anything_is_loaded(
    lines: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(lines)
    assert qtool("batch", str(tmp_path / "nowhere"), str(source), str(tmp_path / "out.jsonl")) == 2
    assert message in capsys.readouterr().err
