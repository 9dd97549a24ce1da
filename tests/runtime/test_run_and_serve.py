"""`qtool run` and `qtool serve` as commands, over the reference engine of the tiny model."""

import json
import socket
from pathlib import Path

import pytest

from qtool.cli import main


def qtool(*arguments: str) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.mark.parametrize("how", [[], ["--raw"], ["--system", "Be brief"]])
def test_run_streams_what_it_gives_as_json(
    how: list[str], tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["run", str(tiny), "Say it", "--max-tokens", "9", "--seed", "5", *how]
    assert qtool(*asked) == 0
    streamed = capsys.readouterr().out
    assert qtool(*asked, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["text"] + "\n" == streamed
    assert result.keys() == {"text", "finish_reason", "prompt_tokens", "completion_tokens"}
    assert 0 < result["completion_tokens"] <= 9


def test_run_ends_at_a_stop_text(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["run", str(tiny), "Say it", "--raw", "--max-tokens", "20", "--temperature", "0"]
    assert qtool(*asked) == 0
    whole = capsys.readouterr().out
    stop = whole[len(whole) // 2]
    assert qtool(*asked, "--stop", stop) == 0
    assert capsys.readouterr().out == whole[: whole.index(stop)] + "\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["", "--raw"], 2, "prompt: is empty"),
        (["x", "--raw", "--system", "y"], 2, "--system has no place in --raw"),
        (["x", "--max-tokens", "300"], 2, "the model's context is 256 tokens"),
        (["x", "--max-tokens", "9" * 15], 2, "the model's context is 256 tokens"),
        (["x", "--top-p", "0"], 2, "top_p: must be above 0"),
    ],
)
def test_run_refuses_what_cannot_be(
    arguments: list[str], code: int, message: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert qtool("run", str(tiny), *arguments) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_run_names_a_folder_that_is_no_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert qtool("run", str(tmp_path / "nowhere"), "x") == 2
    assert "nowhere: is no folder" in capsys.readouterr().err


def test_serve_checks_its_settings_and_its_port_before_it_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = str(tmp_path / "nowhere")
    assert qtool("serve", nowhere, "--max-num-batched-tokens", "3") == 2
    assert "max_num_batched_tokens 3 is below max_num_seqs 64" in capsys.readouterr().err
    assert qtool("serve", nowhere, "--slo", "tpot=5") == 2
    assert "'tpot=5' is no objective" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert qtool("serve", nowhere, "--port", str(port)) == 1
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert qtool("serve", nowhere, "--port", "0") == 2
    assert "nowhere: is no folder" in capsys.readouterr().err
