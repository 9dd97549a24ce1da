"""The packaging table names every folder of the repository that holds qtool's Python."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
APART = {"tests", "benchmarks", "docs"}
"""Top-level folders whose Python is not installed."""


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return table


def _tracked() -> list[Path]:
    """The repository's files, relative to it; links are files of their own."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in output.split("\0") if name and (ROOT / (path := Path(name))).exists()]


def _folders() -> set[Path]:
    """Every folder that holds Python to be installed."""
    files = [path for path in _tracked() if path.suffix == ".py" and len(path.parts) > 1]
    return {path.parent for path in files if path.parts[0] not in APART}


def _package(folder: Path) -> str:
    return ".".join(folder.parts if folder.parts[0] == "qtool" else ("qtool", *folder.parts))


def test_every_folder_is_in_the_table_and_the_other_way_round(table: dict[str, Any]) -> None:
    assert sorted(table["packages"]) == sorted(map(_package, _folders()))


def test_every_folder_outside_the_face_has_its_place(table: dict[str, Any]) -> None:
    places = {_package(folder): folder.as_posix() for folder in _folders() if folder.parts[0] != "qtool"}
    assert table["package-dir"] == {"qtool": "qtool", **places}


def test_every_room_outside_the_face_has_its_link() -> None:
    for room in {folder.parts[0] for folder in _folders()} - {"qtool"}:
        link = ROOT / "qtool" / room
        assert link.is_symlink(), f"ln -s ../{room} {link}"
        assert link.readlink() == Path("..") / room


def test_a_wheel_holds_every_module_and_the_recipes(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for path in _tracked():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, source / path, follow_symlinks=False)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, source]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.partition("/")[0].endswith(".dist-info")}
    kinds = (".py", ".yaml", ".html")
    wanted = [path for path in _tracked() if path.parent in _folders() and path.suffix in kinds]
    assert held == {"/".join((*_package(path.parent).split("."), path.name)) for path in wanted}
