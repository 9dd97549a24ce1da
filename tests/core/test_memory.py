import pytest

from qtool.core.memory import available_memory, parse_bytes
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
