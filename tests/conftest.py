"""Models for the tests: a tiny seeded one for shapes and speed, and the real SmolLM2-135M-Instruct."""

import shutil
from pathlib import Path

import pytest

from qtool.core.catalog import fetch
from tests.models import write_offgrid, write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded Llama checkpoint folder: 3 layers, hidden 96, 3 heads over 1 KV head, intermediate 160."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def tiny_copy(tiny: Path, tmp_path: Path) -> Path:
    """The tiny checkpoint, to be damaged at will."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder, fetched once into qtool's cache."""
    return fetch("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def offgrid(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with the same logits but weights off its 4-bit grid: 4-bit quality is judged on this."""
    return write_offgrid(smollm2, tmp_path_factory.mktemp("offgrid") / "model")
