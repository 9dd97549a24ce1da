"""``qtool train-draft`` and ``qtool compile --draft``, as typed."""

import json
from pathlib import Path

from tests.cli.conftest import Qtool

TEXT = Path(__file__).read_text(encoding="utf-8")


def test_heads_are_trained_compiled_with_the_engine_and_printed_as_folders(
    qtool: Qtool, tiny: Path, tmp_path: Path
) -> None:
    data, heads, engine = tmp_path / "text.txt", tmp_path / "heads", tmp_path / "engine"
    data.write_text(TEXT * 3)
    small = ("--epochs", "0.2", "--depth", "2", "--seq-len", "32", "--max-sequences", "48", "--threads", "1")
    ended = qtool("train-draft", tiny, "--kind", "eagle", "--data", data, "-o", heads, *small)
    assert (ended.code, ended.out) == (0, f"{heads}\n"), ended.err
    assert "tokens a step" in ended.err
    assert "collecting" in ended.err
    record = json.loads((heads / "training.json").read_text())
    assert record["course"]["head"]["kind"] == "eagle"
    assert len(record["report"]["acceptance"]) == 2

    again = qtool("train-draft", tiny, "--kind", "eagle", "--data", data, "-o", heads, *small)
    assert again.code == 2
    assert "already exists" in again.err

    ended = qtool("compile", tiny, "--target", "openvino", "--draft", heads, "-o", engine)
    assert ended.code == 0, ended.err
    assert json.loads((engine / "engine.json").read_text())["hidden_states"]["layers"] == ["final"]
    assert (engine / "draft" / "model.xml").is_file()


def test_an_engine_without_hidden_states_cannot_teach(qtool: Qtool, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    assert qtool("compile", tiny, "--target", "openvino", "-o", tmp_path / "engine").code == 0
    options = ("--engine", tmp_path / "engine", "--data", tmp_path / "text.txt", "-o", tmp_path / "heads")
    ended = qtool("train-draft", tiny, "--kind", "eagle3", *options)
    assert ended.code == 2
    assert "compile it with --hidden-states 0,1,2,final" in ended.err
    assert not list(tmp_path.glob("heads*"))
