"""The recipes that ship with qtool, found by name."""

from pathlib import Path

from qtool.core.recipe import Recipe, load_recipe
from qtool.errors import UsageError, nearest


def shipped() -> dict[str, Path]:
    """The recipe files that ship with qtool, by name: ``awq4``."""
    return {file.stem: file for file in sorted(Path(__file__).parent.glob("*.yaml"))}


def recipe_file(reference: str) -> Path:
    """The file that `reference` means: a path, or a shipped recipe's name with or without ``.yaml``.

    A file at that path wins. Raises UsageError, with the nearest known name, when there is neither.
    """
    path = Path(reference)
    if path.is_file():
        return path
    known = shipped()
    name = reference.removesuffix(".yaml")
    if name not in known:
        raise UsageError(f"{reference}: neither a file nor a shipped recipe; {nearest(name, known)}")
    return known[name]


def find_recipe(reference: str) -> Recipe:
    """The recipe that `reference` means, read and checked; see `recipe_file` and `load_recipe`."""
    return load_recipe(recipe_file(reference))
