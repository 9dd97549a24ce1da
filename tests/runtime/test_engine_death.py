"""A server whose engine dies tells its clients and ends, so that a supervisor starts it again."""

import subprocess
import sys
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from pathlib import Path
from qtool.cli.failures import report
from qtool.errors import QtoolError
from qtool.runtime.client import Client
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.server.process import Address, serve
from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.fake import FakeEngine

def load():
    engine = FakeEngine()
    engine.fail_at = 3
    return Client(engine, Tokenizer.load(Path(sys.argv[1])), SchedulerConfig(8, 64))

try:
    sys.exit(serve(Address(port=0), "model", load, lambda url: print(url, flush=True)))
except QtoolError as error:
    sys.exit(report(error))
"""


def test_a_server_whose_engine_died_tells_the_requests_and_ends_with_an_error(tokenizer_folder: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tokenizer_folder)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            body = {"model": "model", "prompt": "x", "max_tokens": 50, "ignore_eos": True}
            response = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
            assert response.status_code == 500
            assert "the engine failed: RuntimeError" in response.json()["error"]["message"]
            _, stderr = server.communicate(timeout=20)
        finally:
            server.kill()
    assert server.returncode == 1
    assert stderr.splitlines()[-1].startswith(
        "error: the engine failed (RuntimeError: the fake engine was told to"
    )
