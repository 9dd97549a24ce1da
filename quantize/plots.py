"""Pictures of what sensitivity and bit allocation found."""

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from qtool.core.files import refuse_existing
from qtool.core.formats.naming import without_layer
from qtool.errors import UsageError

if TYPE_CHECKING:
    from qtool.quantize.sensitivity import Report

_SUFFIXES = (".svg", ".png", ".pdf")


def require_matplotlib(path: Path) -> None:
    """Raise UsageError where no picture can be drawn at `path`."""
    if path.suffix not in _SUFFIXES:
        raise UsageError(f"{path}: pictures end in {', '.join(_SUFFIXES)}; name it so")
    if find_spec("matplotlib") is None:
        raise UsageError(f"{path}: drawing needs matplotlib; in qtool's folder: pip install -e '.[plot]'")
    refuse_existing(path)


def plot_sensitivity(report: "Report", path: Path) -> None:
    """A row for each kind of part, a column for each layer, the colour its KL; the head is in the title."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    from qtool.quantize.changes import layer_number  # torch, which refusing does without

    rows: dict[str, dict[int, float]] = {}
    rest: list[str] = []
    for part in sorted(report.parts, key=lambda one: (one.what, one.name)):
        layer = layer_number(part.name)
        if layer is None:
            rest.append(f"{part.name} {part.what} {part.kl:.1g}")
        else:
            kind = without_layer(part.name).rpartition("*.")[2]
            rows.setdefault(f"{kind} {part.what}", {})[layer] = part.kl
    layers = range(1 + max((layer for row in rows.values() for layer in row), default=0))
    table = [[row.get(layer, float("nan")) for layer in layers] for row in rows.values()]
    figure = Figure(figsize=(4 + 0.25 * len(layers), 1.5 + 0.3 * len(rows)), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(table, norm=LogNorm(), aspect="auto", cmap="viridis")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xlabel("layer")
    axes.set_title("  ".join(["KL of rounding one part, nats a token", *rest]), fontsize=9)
    figure.colorbar(image)
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
