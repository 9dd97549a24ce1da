import errno
import hashlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qtool.core.files import new_folder, refuse_existing, resumable, sha256, write_text
from qtool.errors import QtoolError, UsageError


def test_a_folder_appears_whole_when_its_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "out"
    with new_folder(path) as folder:
        (folder / "a").write_text("a")
        assert not path.exists()
    assert [file.name for file in path.iterdir()] == ["a"]
    assert [file.name for file in path.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_a_folder_whose_block_fails_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def fill() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "a").write_text("a")
            raise error

    with pytest.raises(type(error)):
        fill()
    assert not list(tmp_path.iterdir())


# safetensors says it in words only
@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_names_the_output_and_leaves_nothing(tmp_path: Path, error: Exception) -> None:
    def fill() -> None:
        with new_folder(tmp_path / "out"):
            raise error

    with pytest.raises(QtoolError, match=r"out: could not be written \(No space left on device\)"):
        fill()
    assert not list(tmp_path.iterdir())


def test_work_that_can_go_on_says_so_where_the_disk_is_full(tmp_path: Path) -> None:
    def fill(error: Exception) -> None:
        with resumable(tmp_path):
            raise error

    full = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
    with pytest.raises(
        QtoolError, match=r"No space left on device\)\. Make room, then give the same command"
    ):
        fill(full)
    for other in (RuntimeError("something else"), UsageError("told")):
        with pytest.raises(type(other), match=str(other)):
            fill(other)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", [True, False])
def test_what_the_system_refuses_is_named_and_going_on_is_told_of_where_something_is(
    there: bool, tmp_path: Path
) -> None:
    folder, entry = tmp_path / "out.partial", tmp_path / "entry"
    entry.mkdir()
    if there:
        folder.mkdir()

    def use() -> None:
        with resumable(folder):
            entry.read_bytes()

    again = "then give the same command" + (": it goes on where it was" if there else "")
    with pytest.raises(QtoolError, match=rf"^{entry}: cannot be used \(Is a directory\)\. Put .*, {again}$"):
        use()


def test_what_a_file_cannot_be_renamed_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(QtoolError, match=r"/folder: cannot be used \(Is a directory\)"), resumable(tmp_path):
        (tmp_path / "file").replace(tmp_path / "folder")


def test_a_full_disk_is_told_where_a_library_only_failed_and_links_are_left_alone(tmp_path: Path) -> None:
    original = tmp_path / "original"
    original.write_bytes(bytes(5000))

    def fill() -> None:
        with new_folder(tmp_path / "out") as folder:
            (folder / "linked").hardlink_to(original)
            raise RuntimeError("basic_ios::clear: iostream error")

    with pytest.raises(RuntimeError, match="iostream"):
        fill()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(QtoolError, match=r"out: could not be written \(File too large\)"):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert original.read_bytes() == bytes(5000)
    assert list(tmp_path.iterdir()) == [original]


@pytest.mark.parametrize("name", ["x" * 231, "ä" * 116, "x" * 300])
def test_a_name_that_leaves_no_room_for_a_temporary_one_is_refused(tmp_path: Path, name: str) -> None:
    for path in (tmp_path / name, tmp_path / name / "out"):
        with pytest.raises(UsageError, match="has a name of more than 230 bytes"):
            refuse_existing(path)
    with new_folder(tmp_path / ("x" * 230)):
        pass


def test_two_runs_of_one_output_leave_each_other_alone_and_the_later_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 7)  # as it is in every container

    def race() -> None:
        with new_folder(tmp_path / "out") as later:
            with new_folder(tmp_path / "out") as first:
                (first / "first").touch()
            (later / "later").touch()

    with pytest.raises(UsageError, match="out: already exists, since another run made it"):
        race()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "first"]


@pytest.mark.parametrize("make", ["new_folder(path)", "_temporary(path, Path.touch)"])
def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path, make: str) -> None:
    lines = (
        "import os, signal, sys",
        "from pathlib import Path",
        "from qtool.core.files import _temporary, new_folder",
        "path = Path(sys.argv[1])",
        f"with {make}: os.kill(os.getpid(), signal.SIGKILL)",
    )
    killed = subprocess.run([sys.executable, "-c", "\n".join(lines), str(tmp_path / "out")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]
    (tmp_path / ".out.notes.partial").touch()
    write_text(tmp_path / "out", "text")
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.notes.partial"}


def test_what_exists_is_refused_even_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    for path in (tmp_path, tmp_path / "link"):
        with pytest.raises(UsageError, match="already exists"):
            refuse_existing(path)


def test_a_path_below_a_file_is_refused_and_checking_creates_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QtoolError, match="file is no folder"):
        refuse_existing(tmp_path / "file" / "a" / "b")
    refuse_existing(tmp_path / "new" / "deep" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_text_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text in ("one", "twö\n"):
        write_text(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert list(tmp_path.iterdir()) == [path]


def test_sha256_of_more_than_one_chunk(tmp_path: Path) -> None:
    path = tmp_path / "a"
    content = b"\0" * (1 << 20) + b"1"
    path.write_bytes(content)
    assert sha256(path) == hashlib.sha256(content).hexdigest()
