"""Files that are kept for a later run: taken when they are whole and made for the same."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from qtool.core.kept import begun, clear, drop, has_kept, is_whole, keep
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


def test_a_file_that_is_gone_is_told(kept: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept.unlink()
    assert not has_kept(kept)
    assert "part-0.safetensors: is gone; it is made anew" in caplog.text


def test_work_goes_on_with_what_it_was_begun_for(tmp_path: Path) -> None:
    folder = tmp_path / "out.partial"
    for _ in range(2):
        with begun(folder, {"recipe": {"bits": 4}, "text": "abc"}):
            pass
    (folder / "layer-0.safetensors").touch()
    with (
        pytest.raises(UsageError, match=r"out\.partial: was begun with another recipe; .* remove the folder"),
        begun(folder, {"recipe": {"bits": 3}, "text": "abc"}),
    ):
        pass
    with (
        pytest.raises(UsageError, match="was begun with another recipe and another text; give"),
        begun(folder, {"recipe": {"bits": 3}, "text": "abd"}),
    ):
        pass


def test_work_that_has_kept_nothing_yet_is_begun_anew_with_something_else(tmp_path: Path) -> None:
    folder = tmp_path / "out.partial"
    for bits in (4, 3):
        with begun(folder, {"recipe": {"bits": bits}}):
            assert sorted(path.name for path in folder.iterdir()) == ["lock", "state.json"]
    (folder / "layer-0.safetensors").touch()
    with begun(folder, {"recipe": {"bits": 3}}):
        pass
    with pytest.raises(UsageError, match="was begun with another recipe"), begun(folder, {"recipe": {}}):
        pass


@pytest.mark.parametrize("state", [b"\xff", b"", b"[]", b"{}", b"null"])
def test_a_damaged_state_is_refused(state: bytes, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(state)
    with (
        pytest.raises(UsageError, match=r"state\.json: is damaged, .*; remove"),
        begun(tmp_path, {"text": "abc"}),
    ):
        pass


@pytest.mark.parametrize("name", ["thesis.txt", "checkpoint/", "state.json/", "layer-00000.safetensors"])
def test_a_folder_that_holds_something_else_is_left_as_it_is(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "out.partial"
    folder.mkdir()
    found = folder / name
    found.mkdir() if name.endswith("/") else found.write_bytes(b"years of work")
    with (
        pytest.raises(
            UsageError, match=rf"out\.partial: holds {found.name}, and no state\.json .* move it away"
        ),
        begun(folder, {"text": "abc"}),
    ):
        pass
    assert list(folder.iterdir()) == [found]


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_what_is_no_folder_is_in_the_way(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "out.partial"
    path.write_bytes(b"") if kind == "file" else path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"out\.partial: is in the way"), begun(path, {"text": "abc"}):
        pass
    assert path.is_symlink() or path.read_bytes() == b""


def test_a_run_killed_before_its_state_was_written_is_taken_up(tmp_path: Path) -> None:
    (tmp_path / "lock").touch()
    (tmp_path / ".state.json.0123abcd.partial").write_bytes(b"{")
    with begun(tmp_path, {"text": "abc"}):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "state.json"]


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with begun(tmp_path / "out.partial", {"text": "abc"}):
        pass
    assert "has no locks (No locks available); let no other run work there" in caplog.text


def test_work_is_one_processes_alone(tmp_path: Path) -> None:
    with (
        begun(tmp_path, {"text": "abc"}),
        pytest.raises(UsageError, match="another run is working there; wait for it"),
        begun(tmp_path, {"text": "abc"}),
    ):
        pass


@pytest.mark.parametrize(
    ("foreign", "said"),
    [
        ([], ""),
        (["thesis.txt"], "it holds thesis.txt, which"),
        (["features/part-9.safetensors"], "it holds features/part-9.safetensors, which"),
        (["features/a/b", "z"], "it holds features/a/b and 1 more, which"),
    ],
)
def test_work_that_is_done_leaves_what_is_not_its_own(
    foreign: list[str], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "out.partial"
    kept = [folder / "layer-0.safetensors", folder / "features" / "part-0.safetensors"]
    with begun(folder, {"text": "abc"}):
        (folder / "features").mkdir()
        (folder / ".probe").touch()
        for path in kept:
            (folder / "temporary").write_bytes(b"numbers")
            keep(folder / "temporary", path)
        for name in foreign:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(b"years of work")
        clear(folder, [*kept, folder / "never-made"])
    left = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
    assert left == foreign
    assert folder.exists() == bool(foreign)
    assert said in caplog.text
    assert bool(caplog.text) == bool(foreign)
