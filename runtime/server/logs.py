"""Logs: one JSON object a line, for machines that read them."""

import json
import logging
import sys
from datetime import UTC, datetime

from qtool.runtime.server.settings import LogFormat

access = logging.getLogger("qtool.access")
"""One record for each request; `fields` of the record holds what is known of it."""


class JsonFormatter(logging.Formatter):
    """Writes a record as an object: time, level, logger, message, and the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


def set_up_logging(log_format: LogFormat) -> None:
    """Send every logger's records to stderr: warnings as text, or requests too as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO if log_format == "json" else logging.WARNING)
