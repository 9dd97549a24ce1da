import errno
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cli.conftest import Qtool


def _failing_fetch(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(name: str) -> Path:
        raise error

    monkeypatch.setattr("qtool.core.catalog.fetch", fail)


def test_help_names_every_command(qtool: Qtool) -> None:
    ended = qtool("--help")
    assert ended.code == 0
    for command in ("fetch", "quantize", "eval", "compile", "serve", "run", "recipe"):
        assert f" {command} " in ended.out


def test_version_tells_the_packages_that_decide_a_result(qtool: Qtool) -> None:
    ended = qtool("--version")
    assert ended.code == 0
    for package in ("qtool", "torch", "transformers", "openvino"):
        assert f"{package} {version(package)}\n" in ended.out


def test_an_unknown_command_ends_with_2_and_the_nearest_known_one(qtool: Qtool) -> None:
    ended = qtool("quantise")
    assert ended.code == 2
    assert "'quantize'" in ended.err


def test_an_unexpected_error_is_one_line_and_points_to_debug(
    qtool: Qtool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing_fetch(monkeypatch, ZeroDivisionError("by nought"))
    ended = qtool("fetch", "x")
    assert ended.code == 1
    assert ended.out == ""
    assert ended.err == (
        "error: unexpected ZeroDivisionError: by nought; rerun as 'qtool --debug ...' for the traceback\n"
    )


@pytest.mark.parametrize("asked_by", ["option", "environment"])
def test_debug_shows_the_traceback_and_still_the_error(
    qtool: Qtool, monkeypatch: pytest.MonkeyPatch, asked_by: str
) -> None:
    monkeypatch.setenv("QTOOL_DEBUG", "1" if asked_by == "environment" else "")
    _failing_fetch(monkeypatch, ZeroDivisionError("by nought"))
    ended = qtool(*["--debug"] * (asked_by == "option"), "fetch", "x")
    assert ended.code == 1
    assert "Traceback" in ended.err
    assert ended.err.endswith("error: unexpected ZeroDivisionError: by nought\n")


def test_a_full_disk_and_a_forbidden_file_name_the_file_and_the_next_step(
    qtool: Qtool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing_fetch(monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/here/model"))
    ended = qtool("fetch", "x")
    assert ended.code == 1
    assert ended.err.startswith("error: /here/model: No space left on device; free some space")
    _failing_fetch(monkeypatch, PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/here/model"))
    assert qtool("fetch", "x").err.startswith("error: /here/model: Permission denied; change its permissions")


def test_an_interrupted_command_ends_with_130(qtool: Qtool, monkeypatch: pytest.MonkeyPatch) -> None:
    _failing_fetch(monkeypatch, KeyboardInterrupt())
    ended = qtool("fetch", "x")
    assert ended.code == 130
    assert "Traceback" not in ended.err
