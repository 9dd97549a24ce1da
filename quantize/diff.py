"""Compare two checkpoints, or two manifests: what differs, linear by linear."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from qtool.core.manifest import MANIFEST, LinearRecord, read_manifest
from qtool.errors import UsageError
from qtool.quantize.difference import Difference, Side


def diff(a: Path, b: Path) -> Iterator[Difference]:
    """Compare two checkpoint folders tensor by tensor, or two manifest files linear by linear.

    Raises UsageError when one is a file and the other a folder, QtoolError for what is damaged.
    """
    if a.is_dir() and b.is_dir():
        from qtool.quantize.checkpoint_diff import diff_checkpoints  # torch, which manifests do without

        return diff_checkpoints(a, b)
    if a.is_file() and b.is_file():
        return _manifests(read_manifest(a).linears, read_manifest(b).linears)
    raise UsageError(f"{a}, {b}: wanted two checkpoint folders, or two {MANIFEST} files")


def _manifests(a: Mapping[str, LinearRecord], b: Mapping[str, LinearRecord]) -> Iterator[Difference]:
    for name in sorted({*a, *b}):
        one, other = _recorded(a.get(name)), _recorded(b.get(name))
        same = None if one is None or other is None else one.scheme == other.scheme
        yield Difference(name=name, a=one, b=other, same_format=same)


def _recorded(record: LinearRecord | None) -> Side | None:
    if record is None:
        return None
    return Side(scheme=record.scheme, num_bits=record.num_bits, record=record)
