"""The command line run inside the test's process."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from qtool.cli import main


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


Qtool = Callable[..., Ended]


@pytest.fixture
def qtool(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Qtool:
    """Run ``qtool ARGUMENTS...``; what child processes print is captured too."""
    monkeypatch.delenv("QTOOL_DEBUG", raising=False)

    def run(*arguments: str | Path) -> Ended:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, *capfd.readouterr())

    return run
