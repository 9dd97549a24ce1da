"""``qtool sensitivity``: the table, the picture, JSON, and what is refused."""

import json
from pathlib import Path

from tests.cli.conftest import Qtool

SHORT = ("--num-samples", "2", "--seq-len", "32", "--check", "4")


def test_the_table_says_how_well_it_ranks_and_whether_the_model_agrees(qtool: Qtool, tiny: Path) -> None:
    ended = qtool("sensitivity", tiny, *SHORT, "--top", "3")
    assert ended.code == 0
    assert "rank correlation with 4 measured parts:" in ended.out
    assert ended.out.count("published: weights < activations < KV cache < attention") == 2
    assert "layers 3/3" in ended.err


def test_too_few_measured_parts_rank_nothing(qtool: Qtool, tiny: Path) -> None:
    ended = qtool("sensitivity", tiny, *SHORT[:-1], "2")
    assert ended.code == 0
    assert "rank correlation with 2 measured parts: none, since that takes 3 (--check)" in ended.out


def test_a_recipe_says_which_parts_and_a_picture_is_drawn(qtool: Qtool, tiny: Path, tmp_path: Path) -> None:
    picture = tmp_path / "parts.png"
    ended = qtool("sensitivity", tiny, *SHORT, "-r", "smoothquant8", "--json", "--plot", picture)
    assert ended.code == 0
    report = json.loads(ended.out)
    assert {(part["what"], part["format"]) for part in report["parts"]} == {
        ("weights", "int8 symmetric, channel"),
        ("activations", "int8 per token activations"),
    }
    assert len(report["parts"]) == 2 * 9
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_another_kind_is_refused_before_any_work(qtool: Qtool, tiny: Path) -> None:
    ended = qtool("sensitivity", tiny, "--plot", "parts.jpeg")
    assert (ended.code, ended.out) == (2, "")
    assert "pictures end in .svg, .png, .pdf" in ended.err
