import platform
from pathlib import Path

import pytest

from qtool.core.memory import available_memory, parse_bytes, release_freed_memory
from qtool.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [("6GB", 6 * 10**9), ("1.5GiB", 3 * 2**29), ("200 mb", 2 * 10**8), ("1KB", 1000), (" 2TiB ", 2**41)],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "6", "GB", "-1GB", "0GB", "0.0MB", "6 apples", "1e3GB", "6GBit"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no size of memory; write it as in 6GB"):
        parse_bytes(text)


def test_some_memory_is_available() -> None:
    assert 2**20 < available_memory() < 2**50


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep less of freed memory")
def test_holes_that_freed_memory_leaves_are_given_back() -> None:
    size = 2**20
    bytearray(b"x") * (16 * size)  # freed at once; from then on glibc takes what is smaller from its heap
    pieces = [(bytearray(b"x") * size, bytearray(b"x") * (size // 8)) for _ in range(200)]
    kept = [small for _, small in pieces]
    pieces.clear()
    before = resident()
    release_freed_memory()
    assert before - resident() > 100 * size
    assert len(kept) == 200
