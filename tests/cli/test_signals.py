import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Qtool

STUCK = """
import time
import qtool.compile.backends.reference as backend
from qtool.__main__ import main

def write(checkpoint, config, folder, hidden_layers):
    (folder / "half").write_text("written")
    print("writing", flush=True)
    time.sleep(60)

backend.write = write
main()
"""
WHILE_IMPORTING = """
import sys
from qtool.__main__ import main

class Interrupting:
    def find_spec(self, *arguments):
        raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_a_command_quietly_and_leaves_nothing(
    tiny: Path, tmp_path: Path, number: int, code: int
) -> None:
    arguments = ["compile", str(tiny), "--target", "reference", "-o", str(tmp_path / "engine")]
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(number)
        _, printed = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in printed
    assert not list(tmp_path.iterdir())


def test_an_interruption_of_the_command_line_s_own_imports_is_quiet() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WHILE_IMPORTING], capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize(("cause", "code"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_error_that_an_interruption_was_turned_into_is_none(
    qtool: Qtool, monkeypatch: pytest.MonkeyPatch, cause: BaseException, code: int
) -> None:
    def fail(name: str) -> Path:
        try:
            raise cause
        except BaseException:
            raise ImportError("initialization failed") from cause

    monkeypatch.setattr("qtool.core.catalog.fetch", fail)
    ended = qtool("fetch", "x")
    assert (ended.code, ended.out, ended.err) == (code, "", "")
