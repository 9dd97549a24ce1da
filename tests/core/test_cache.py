import subprocess
import sys
from pathlib import Path

import pytest

from qtool.core.cache import build_once, cache_folder
from qtool.errors import QtoolError


def test_the_environment_moves_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("QTOOL_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "qtool"


def test_a_failed_build_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        build_once(tmp_path / "model", fail)
    assert not (tmp_path / "model").exists()
    build_once(tmp_path / "model", lambda folder: (folder / "whole").touch())
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["whole"]


def test_of_processes_that_ask_at_once_one_builds(tmp_path: Path) -> None:
    script = """
import sys, time
from pathlib import Path
from qtool.core.cache import build_once
def build(folder):
    with Path(sys.argv[2]).open("a") as log:
        log.write("built ")
    time.sleep(0.5)
    (folder / "whole").touch()
print([path.name for path in build_once(Path(sys.argv[1]), build).iterdir()])
"""
    command = [sys.executable, "-c", script, str(tmp_path / "model"), str(tmp_path / "log")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0] for process in processes] == ["['whole']\n"] * 3
    assert (tmp_path / "log").read_text() == "built "


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QtoolError, match="set QTOOL_CACHE"):
        build_once(tmp_path / "file" / "model", lambda folder: None)
