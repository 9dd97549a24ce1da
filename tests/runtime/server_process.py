"""Serves the fake engine in a process of its own; the arguments are those of `main`."""

import sys
import time
from pathlib import Path

from qtool.cli.failures import report
from qtool.errors import QtoolError
from qtool.runtime.client import Client
from qtool.runtime.scheduler import SchedulerConfig
from qtool.runtime.server.process import Address, serve
from qtool.runtime.server.settings import LogFormat, ServerSettings
from qtool.runtime.tokenizer import Tokenizer
from tests.runtime.fake import FakeEngine


def main(
    folder: str,
    port: str,
    seconds_a_step: str,
    drain_timeout: str,
    seconds_to_load: str,
    log_format: LogFormat = "text",
    otlp_endpoint: str = "",
) -> int:
    """Print "loading" when the engine is asked for and the URL when it is served."""

    def load() -> Client:
        print("loading", flush=True)
        time.sleep(float(seconds_to_load))
        engine = FakeEngine(num_blocks=64)
        engine.seconds_a_step = float(seconds_a_step)
        return Client(engine, Tokenizer.load(Path(folder)), SchedulerConfig(8, 64))

    try:
        return serve(
            Address(port=int(port)),
            "model",
            load,
            lambda url: print(url, flush=True),
            ServerSettings(
                drain_timeout_s=float(drain_timeout),
                log_format=log_format,
                otlp_endpoint=otlp_endpoint or None,
            ),
        )
    except QtoolError as error:
        return report(error)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))  # type: ignore[arg-type]
