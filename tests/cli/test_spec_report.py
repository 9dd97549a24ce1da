import json
from pathlib import Path

from tests.cli.conftest import Qtool


def test_a_report_has_the_spread_of_what_was_measured(qtool: Qtool, tiny: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import numpy as np\nclass Tokenizer\n")
    options = ("--prompts", prompts, "--speculative", "ngram", "--batch", "2", "--max-tokens", "8")
    ended = qtool("spec-report", tiny, *options, "--repeats", "2", "--json")
    assert ended.code == 0, ended.err
    report = json.loads(ended.out)
    (ngram,) = report["drafters"]
    assert (report["num_prompts"], ngram["name"], ngram["answers_differ"]) == (2, "ngram", 0)
    speedup = ngram["measured"]["2"]
    assert 0 < speedup["lowest"] <= speedup["median"] <= speedup["highest"]

    ended = qtool("spec-report", tiny, *options)
    assert ended.code == 0, ended.err
    assert "Recommended: --speculative" in ended.out


def test_a_prompt_may_hold_other_line_ends(qtool: Qtool, tiny: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "import\u2028numpy"}, ensure_ascii=False) + "\n")
    options = ("--speculative", "ngram", "--batch", "1", "--max-tokens", "4", "--repeats", "1", "--json")
    ended = qtool("spec-report", tiny, "--prompts", prompts, *options)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out)["num_prompts"] == 1


def test_a_batch_is_filled_by_prompts(qtool: Qtool, tiny: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import numpy\n")
    ended = qtool("spec-report", tiny, "--prompts", prompts, "--batch", "2")
    assert (ended.code, ended.out) == (2, "")
    assert "--batch 2: " in ended.err
    assert "prompts.txt holds 1 prompts; give smaller batches or more prompts" in ended.err
    ended = qtool("spec-report", tiny, "--prompts", prompts, "--max-tokens", "4", "--repeats", "1", "--json")
    assert ended.code == 0, ended.err
    assert list(json.loads(ended.out)["drafters"][0]["measured"]) == ["1"]


def test_prompts_that_cannot_be_read_are_refused(qtool: Qtool, tiny: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    for text, said in (("\n", "holds no prompts"), ('{"text": 1}\n', "prompts.jsonl:1: has neither")):
        prompts.write_text(text)
        ended = qtool("spec-report", tiny, "--prompts", prompts)
        assert (ended.code, ended.out) == (2, "")
        assert said in ended.err
