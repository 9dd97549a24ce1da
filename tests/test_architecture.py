"""The arrows between the rooms, and what must stay light."""

import ast
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("core", "recipes", "calibrate", "quantize", "compile", "runtime", "eval", "cli")
"""From left to right: a room imports only itself and those to its left."""
HEAVY = {"torch", "transformers", "openvino", "numpy", "safetensors", "yaml", "fastapi", "huggingface_hub"}


def _file(module: str) -> Path | None:
    """The source file of a module of qtool's, found through the links in ``qtool/``."""
    path = ROOT.joinpath(*module.split("."))
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _modules() -> Iterator[str]:
    for room in ROOMS:
        folder = ROOT / "qtool" / room
        for file in sorted(folder.rglob("*.py")):
            name = ".".join(("qtool", room, *file.relative_to(folder).with_suffix("").parts))
            yield name.removesuffix(".__init__")


@cache
def _imports(module: str) -> frozenset[str]:
    """Every module that `module` imports, inside functions and for type checking too."""
    file = _file(module)
    if file is None:
        return frozenset()
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: import by the full name, not relative to the file"
            source = node.module or ""
            members = {f"{source}.{alias.name}" for alias in node.names}
            found |= {member for member in members if _file(member)} or {source}
    return frozenset(found)


def _room(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "qtool" and len(parts) > 1 and parts[1] in ROOMS else None


def test_every_folder_of_the_face_is_a_room() -> None:
    folders = {path.name for path in (ROOT / "qtool").iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_itself_and_rooms_to_its_left(room: str) -> None:
    allowed = set(ROOMS[: ROOMS.index(room) + 1])
    modules = [module for module in _modules() if _room(module) == room]
    assert modules
    for module in modules:
        wrong = {name for name in _imports(module) if _room(name) not in allowed | {None}}
        assert not wrong, f"{module} imports {wrong}"


def test_nothing_imports_a_room_from_the_face_or_the_tests() -> None:
    for module in _modules():
        for name in _imports(module):
            assert not (name.startswith("qtool.") and name.removeprefix("qtool.") in ROOMS[2:]), (
                f"{module} imports the room {name}: name the module in it"
            )
            assert name.split(".")[0] != "tests", f"{module} imports {name}"


@pytest.mark.parametrize("module", ["qtool.runtime.scheduler", "qtool.runtime.blocks"])
def test_scheduling_policy_is_plain_python(module: str) -> None:
    foreign = {name.split(".")[0] for name in _imports(module)} - {"qtool"}
    assert foreign <= sys.stdlib_module_names


_LIMIT = 0.3
"""Seconds of the processor, which other work on the machine inflates: one good try of several will do."""
_TRIES = 8


@pytest.mark.parametrize("arguments", [["--help"], ["quantize", "--help"], ["recipe", "--help"]])
def test_help_is_quick_and_imports_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "from qtool.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit as ended: code = ended.code\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    took = [_LIMIT]
    while min(took) >= _LIMIT and len(took) <= _TRIES:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-c", script, *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        imported = HEAVY.intersection(ended.stderr.split())
        assert not imported
    assert min(took) < _LIMIT, f"seconds: {took[1:]}"
