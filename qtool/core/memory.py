"""How much memory there is, how people write it, and giving it back."""

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path

from qtool.errors import UsageError

_POWERS = "KMGT"


def available_memory() -> int:
    """Bytes that can be used without swapping, as the kernel estimates; half of all where it does not."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def release_freed_memory() -> None:
    """Give back to the system what the C library keeps of freed memory, where it is one that can (glibc).

    What comes and goes in tensors of megabytes leaves holes between them that the next ones do not fit into:
    a run over many layers would grow with each.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def parse_bytes(text: str) -> int:
    """Bytes as in ``6GB`` (10^9 each) or ``1.5GiB`` (2^30). Raises UsageError for anything else."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?) ?([{_POWERS}]I?B)", text.strip().upper())
    if match is None or not float(match[1]):
        raise UsageError(f"{text!r} is no size of memory; write it as in 6GB or 1.5GiB")
    base = 1024 if "I" in match[2] else 1000
    return int(float(match[1]) * base ** (_POWERS.index(match[2][0]) + 1))
