"""``qtool train-draft`` and ``qtool compile --draft``, as typed."""

import json
import re
from pathlib import Path

from qtool.runtime.engines import open_engine
from qtool.runtime.speculation.build import SpeculationConfig, make_drafters
from qtool.runtime.tokenizer import Tokenizer
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
    for part in ("collecting", "fitting", "judging the start", "training", "judging the heads"):
        assert re.search(rf"^{part} (\d+)/\1\b", ended.err, re.MULTILINE), part
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


def test_a_draft_models_engine_is_compiled_in_and_found_by_auto(
    qtool: Qtool, tiny: Path, tmp_path: Path
) -> None:
    small, engine = tmp_path / "small", tmp_path / "engine"
    assert qtool("compile", tiny, "--target", "openvino", "-o", small).code == 0
    ended = qtool("compile", tiny, "--target", "reference", "--draft", small, "-o", engine)
    assert ended.code == 0, ended.err
    drafters = make_drafters(
        SpeculationConfig("auto"),
        open_engine(engine, kv_cache_tokens=256),
        Tokenizer.load(engine),
        engine,
        None,
    )
    assert [drafter.name for drafter in drafters] == ["ngram", "draft"]

    (small / "model.bin").unlink()
    ended = qtool("compile", tiny, "--target", "reference", "--draft", small, "-o", tmp_path / "other")
    assert ended.code == 1
    assert "holds no *.bin" in ended.err

    (small / "engine.json").unlink()
    ended = qtool("compile", tiny, "--target", "reference", "--draft", small, "-o", tmp_path / "other")
    assert ended.code == 2
    assert "medusa_lm_head.pt; wanted draft heads; compile --draft also takes a draft model's" in ended.err


def test_a_draft_models_engine_with_another_vocabulary_is_refused(
    qtool: Qtool, tiny: Path, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    assert qtool("compile", tiny, "--target", "openvino", "-o", small).code == 0
    file = small / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", "<|other|>"))
    ended = qtool("compile", tiny, "--target", "openvino", "--draft", small, "-o", tmp_path / "engine")
    assert ended.code == 2
    assert "another vocabulary" in ended.err
    assert not (tmp_path / "engine").exists()
