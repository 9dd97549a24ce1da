"""What an operator decides about the server, apart from the engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qtool.errors import UsageError
from qtool.runtime.tools.formats import ToolFormat

LogFormat = Literal["text", "json"]


@dataclass(frozen=True)
class ServerSettings:
    """How requests are let in, and how the server ends and speaks."""

    api_keys: frozenset[str] = frozenset()
    """Keys of which a client has to send one; empty lets everyone in."""
    allow_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API; none by default, so that no page a user visits can."""
    max_body_bytes: int = 8 * 2**20
    """A request with more is a 413."""
    request_timeout_s: float | None = None
    """Seconds that a request has when it names no deadline of its own."""
    drain_timeout_s: float | None = None
    """Seconds that admitted requests have after SIGTERM; None lets them finish however long they take."""
    tool_format: ToolFormat | None = None
    """How the model writes tool calls; None reads it off the chat template."""
    log_format: LogFormat = "text"
    """"json" writes one object a line, and one line for every request."""
    otlp_endpoint: str | None = None
    """Base URL of a collector that gets a span for each request; None makes none."""

    def __post_init__(self) -> None:
        if self.otlp_endpoint is not None and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise UsageError(
                f"the OTLP endpoint {self.otlp_endpoint!r} is no http URL; give the collector's, as in "
                "http://127.0.0.1:4318"
            )


def read_api_keys(path: Path) -> frozenset[str]:
    """The keys of a file, one a line; blank lines and lines that begin with # are skipped.

    Raises UsageError when the file can't be read, holds no key, or a key has a character that no header can.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: the API keys cannot be read ({error}); write one key a line") from error
    keys = {line.strip() for line in lines if line.strip() and not line.startswith("#")}
    if not keys:
        raise UsageError(f"{path}: holds no API key, which would shut everyone out; write one key a line")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise UsageError(f"{path}: a key may hold only printable ASCII without spaces; replace the others")
    return frozenset(keys)
