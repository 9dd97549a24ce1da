"""Files that are kept for a later run: taken when they are whole and made for the same."""

from pathlib import Path

import pytest

from qtool.core.kept import check_begun, drop, has_kept, is_whole, keep
from qtool.errors import UsageError


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    (tmp_path / "temporary").write_bytes(b"numbers")
    keep(tmp_path / "temporary", tmp_path / "part-0.safetensors")
    return tmp_path / "part-0.safetensors"


def test_a_kept_file_is_whole_and_goes_with_its_seal(kept: Path) -> None:
    assert [file.name for file in sorted(kept.parent.iterdir())] == ["part-0.safetensors", "part-0.sha256"]
    assert is_whole(kept)
    assert has_kept(kept)
    drop(kept)
    assert not has_kept(kept)
    assert not list(kept.parent.iterdir())


@pytest.mark.parametrize("damage", ["one bit", "cut short", "no seal", "bad seal"])
def test_a_damaged_file_is_removed_with_a_warning(
    damage: str, kept: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seal = kept.with_suffix(".sha256")
    match damage:
        case "one bit":
            kept.write_bytes(b"numbert")
        case "cut short":
            kept.write_bytes(b"number")
        case "no seal":
            seal.unlink()
        case "bad seal":
            seal.write_bytes(b"\xff")
    assert not has_kept(kept)
    assert "part-0.safetensors: is damaged; it is made anew" in caplog.text
    assert not list(kept.parent.iterdir())


def test_work_goes_on_with_what_it_was_begun_for(tmp_path: Path) -> None:
    for _ in range(2):
        check_begun(tmp_path, "abc", "recipe or text")
    with pytest.raises(UsageError, match=r"was begun with another recipe or text, .* remove the folder"):
        check_begun(tmp_path, "abd", "recipe or text")
    (tmp_path / "state.json").write_bytes(b"\xff")
    with pytest.raises(UsageError, match=r"or state\.json there is damaged; remove the folder"):
        check_begun(tmp_path, "abc", "recipe or text")
