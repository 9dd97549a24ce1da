"""The server as a process: its port, its signals and its exit codes."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

ROOT = Path(__file__).parents[2]


@contextmanager
def process(
    folder: Path,
    seconds_a_step: float,
    port: int = 0,
    drain_timeout: float = 60,
    seconds_to_load: float = 0,
    log_format: str = "text",
    otlp_endpoint: str = "",
) -> Iterator[subprocess.Popen[str]]:
    command = [
        sys.executable,
        "-m",
        "tests.runtime.server_process",
        str(folder),
        str(port),
        str(seconds_a_step),
        str(drain_timeout),
        str(seconds_to_load),
        log_format,
        otlp_endpoint,
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            yield server
        finally:
            if server.poll() is None:
                server.kill()


def url_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    assert server.stdout.readline() == "loading\n"
    return server.stdout.readline().strip()


def num_admitted(url: str) -> int:
    """Sequences that run or wait."""
    page = httpx.get(f"{url}/metrics").text.splitlines()
    values = [
        line.split()[1] for line in page if line.startswith(("qtool_requests_running", "qtool_requests_w"))
    ]
    return int(sum(map(float, values)))


class Asking(threading.Thread):
    """A streamed request in a thread of its own; `text` and `error` hold its outcome."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__()
        self.url, self.max_tokens = url, max_tokens
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.error: httpx.HTTPError | None = None
        self.start()

    def run(self) -> None:
        body: dict[str, Any] = {
            "model": "model",
            "prompt": "x",
            "max_tokens": self.max_tokens,
            "stream": True,
            "ignore_eos": True,
        }
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=30) as response:
                for line in response.iter_lines():
                    self.lines.append(line)
                    self.begun.set()
        except httpx.HTTPError as error:
            self.error = error
            self.begun.set()

    @property
    def complete(self) -> bool:
        return "data: [DONE]" in self.lines and any('"finish_reason":"length"' in line for line in self.lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_admitted_requests_finish_refuses_new_ones_and_exits_0(
    number: signal.Signals, tokenizer_folder: Path
) -> None:
    with process(tokenizer_folder, 0.02) as server:
        url = url_of(server)
        asking = [Asking(url, 50) for _ in range(12)]  # four of them wait: 8 run at once
        while num_admitted(url) < 12:
            assert not any(request.complete for request in asking)
        server.send_signal(number)
        time.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        for request in asking:
            request.join(30)
        assert [request.complete for request in asking] == [True] * 12
        assert server.wait(10) == 0


def test_a_second_signal_stops_at_once(tokenizer_folder: Path) -> None:
    with process(tokenizer_folder, 0.05) as server:
        request = Asking(url_of(server), 200)
        assert request.begun.wait(10)
        server.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.poll() is None
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 128 + signal.SIGTERM
        request.join(20)
        assert not request.complete


def test_the_drain_timeout_ends_what_is_not_finished_and_tells_its_client(tokenizer_folder: Path) -> None:
    with process(tokenizer_folder, 0.05, drain_timeout=0.3) as server:
        request = Asking(url_of(server), 200)
        assert request.begun.wait(10)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 128 + signal.SIGTERM
        request.join(20)
        assert not request.complete
        assert any("the server was stopped" in line for line in request.lines)


def test_while_the_model_loads_everything_is_503_and_a_signal_ends_it(tokenizer_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with process(tokenizer_folder, 0, port, seconds_to_load=30) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "loading\n"
        with httpx.Client(transport=httpx.HTTPTransport(retries=3)) as client:
            for path in ("/health", "/v1/models"):
                response = client.get(f"http://127.0.0.1:{port}{path}")
                assert response.status_code == 503
                assert "being loaded" in response.json()["error"]["message"]
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 128 + signal.SIGTERM


def test_an_idle_server_ends_at_once(tokenizer_folder: Path) -> None:
    with process(tokenizer_folder, 0) as server:
        url = url_of(server)
        assert httpx.get(f"{url}/health").status_code == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert server.stderr is not None
        assert server.stderr.read() == ""


def test_a_port_in_use_is_an_error_before_anything_is_loaded(tokenizer_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with process(tokenizer_folder, 0, port) as server:
            stdout, stderr = server.communicate(timeout=20)
    assert server.returncode == 1
    assert "loading" not in stdout
    assert (
        stderr
        == f"error: cannot listen on 127.0.0.1:{port} (Address already in use); choose another --port\n"
    )
