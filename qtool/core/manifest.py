"""``qtool_manifest.json``: how a quantized checkpoint came to be."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from qtool.core.recipe import Recipe
from qtool.core.records import read_record

MANIFEST = "qtool_manifest.json"
_RECORDED = (
    "qtool",
    "torch",
    "transformers",
    "safetensors",
    "compressed-tensors",
    "onnx",
    "openvino",
    "tensorrt",
)


class LinearRecord(BaseModel):
    """What was done to one linear, and what it cost."""

    model_config = ConfigDict(frozen=True)

    method: str
    """What made the codes: for `best`, the method that won."""
    scheme: str
    """The number formats in words: of weights, and of inputs where they are rounded."""
    num_bits: int
    group_size: int | None
    symmetric: bool
    tokens: int
    """Calibration tokens that the linear saw. Where it saw none, SQNRs are those of its weights: nothing
    was to be calibrated in its layer, or no token chose it as an expert."""
    starved: bool = False
    """These were too few for the recipe's method, so that the weights were just rounded to nearest."""
    dead_inputs: int
    """Inputs that were zero for all of them: their weights are rounded blindly."""
    sqnr_rtn_db: float
    """Signal to quantization noise of the linear's output on the calibration inputs, in decibel, had its
    weights just been rounded."""
    sqnr_db: float
    """The same with the method."""
    clip_ratio: float | None = None
    """AWQ: by how much the groups' ranges were shrunk, on average; null for other methods."""
    alpha: float | None = None
    """AWQ, SmoothQuant: the exponent that channel scales came from; null where there are none."""
    absorber: str | None = None
    """AWQ, SmoothQuant: what absorbed the channel scales; null where nothing could exactly."""


class Point(BaseModel):
    """One way of sharing out bits that no other beats in both size and estimated KL."""

    model_config = ConfigDict(frozen=True)

    average_bits: float
    """Of a weight, scales and zero points counted in."""
    bytes: int
    kl: float
    """Estimated, nats a token."""


class Allocation(BaseModel):
    """How ``auto`` shared out bits."""

    model_config = ConfigDict(frozen=True)

    candidates: dict[str, int]
    """Of each linear, the place of its number format among the recipe's candidates."""
    chosen: Point
    frontier: tuple[Point, ...]
    """Others that were to be had, from small to large: some of them, evenly spread."""


class Manifest(BaseModel):
    """The record beside a quantized checkpoint."""

    model_config = ConfigDict(frozen=True)

    schema_version: int = 1
    recipe: Recipe
    inputs: dict[str, str]
    """sha256 of every input file by name, and of the calibration text by its reference."""
    outputs: dict[str, str]
    """sha256 of every output file, by name."""
    versions: dict[str, str]
    seed: int
    linears: dict[str, LinearRecord]
    allocation: Allocation | None = None
    """Where the recipe has ``auto``."""
    untied_head: bool = False
    """lm_head was the embedding table, and has become a matrix of its own."""
    seconds: float
    """Wall time of the run that finished it; layers that an interrupted run left behind are not counted."""
    peak_memory_bytes: int

    def save(self, folder: Path) -> None:
        """Write the manifest into `folder`."""
        (folder / MANIFEST).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_manifest(file: Path) -> Manifest:
    """The manifest in a file; QtoolError names the file, and the field that is wrong."""
    return read_record(file, Manifest, "wanted a manifest of this version of qtool")


def versions() -> dict[str, str]:
    """The installed versions of the packages that decide a result."""
    found = {}
    for package in _RECORDED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
