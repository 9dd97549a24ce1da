"""What the builder's log says about a build: anything but silence on trouble fails it."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Line(NamedTuple):
    """One message of the builder."""

    severity: str
    """INTERNAL_ERROR, ERROR, WARNING, INFO or VERBOSE."""
    text: str


ALLOWED_WARNINGS = (
    r"Make sure input \S+ has Int64 binding",  # advice to whoever sets addresses
)
_IGNORED_INPUT = "Unused Input"
"""An input of the graph, or of an operator, that the built engine would not look at."""


def faults(lines: Iterable[Line]) -> Iterator[str]:
    """The messages for which a build has failed, whatever the builder returned."""
    for line in lines:
        allowed = any(re.search(pattern, line.text) for pattern in ALLOWED_WARNINGS)
        if line.severity in ("INTERNAL_ERROR", "ERROR"):
            yield line.text
        elif line.severity == "WARNING" and not allowed:
            yield f"warning: {line.text}"
        elif _IGNORED_INPUT.lower() in line.text.lower():
            yield line.text
