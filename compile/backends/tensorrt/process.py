"""Run a native builder in a child process, so that its crash is an error and not the end of qtool."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from qtool.compile.backends.tensorrt.log import Line, faults
from qtool.compile.backends.tensorrt.worker import FAILED, BuildSpec
from qtool.core.files import check_room
from qtool.errors import QtoolError

Progress = Callable[[str, float], None]
"""Is told the phase that a build is in, and the share of the whole that is done, 0 to 1."""
_WORKER = (sys.executable, "-m", "qtool.compile.backends.tensorrt.worker")
_LAST_LINES = 12


def run_build(spec: BuildSpec, progress: Progress, command: Sequence[str] = _WORKER) -> list[Line]:
    """Build a plan in a child process; the builder's messages.

    Raises OSError when it ended for want of room on the disk.
    Raises QtoolError when the builder fails or crashes, and when it succeeds but logged anything that
    `log.faults` knows; the message has the builder's own words.
    """
    with (
        spec.log.with_suffix(".stderr").open("w+", encoding="utf-8", errors="replace") as printed,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=printed, text=True
        ) as child,
    ):
        try:
            _follow(child, spec, progress)
        finally:
            child.kill()  # only when the above was interrupted is there anything left to end
        code = child.wait()
        if code != 0:
            check_room(spec.plan.parent)  # which the builder has no words for
        lines = _read(spec.log)
        if code not in (0, FAILED):
            raise QtoolError(_crash(spec, code, lines, printed))
    found = list(dict.fromkeys(faults(lines)))
    if found or code == FAILED:
        said = "\n  ".join(found or ["nothing"])
        raise QtoolError(f"the builder of {spec.target} refused the graph or part of it. It said:\n  {said}")
    return lines


def _follow(child: "subprocess.Popen[str]", spec: BuildSpec, progress: Progress) -> None:
    if child.stdin is None or child.stdout is None:
        raise AssertionError("both are pipes")
    try:
        child.stdin.write(spec.model_dump_json())
        child.stdin.close()
    except BrokenPipeError:
        pass  # it ended at once; its exit code says how
    for line in child.stdout:
        phase, share = json.loads(line)
        progress(phase, share)
    child.wait()


def _read(log: Path) -> list[Line]:
    if not log.is_file():
        return []
    return [Line(*json.loads(line)) for line in log.read_text(encoding="utf-8").splitlines()]


def _crash(spec: BuildSpec, code: int, lines: Sequence[Line], printed: TextIO) -> str:
    ended = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    printed.seek(0)
    last = [f"{line.severity}: {line.text}" for line in lines[-_LAST_LINES:]]
    last += printed.read().splitlines()[-_LAST_LINES:]
    said = "\n  ".join(text[:400] for text in last) or "nothing"
    return f"the builder process of {spec.target} {ended}. The last that it said:\n  {said}"
