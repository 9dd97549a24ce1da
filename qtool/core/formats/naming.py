"""Name many linears briefly: those of every layer by what their names share."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def brief(modules: Iterable[str], every: Iterable[str]) -> list[list[str]]:
    """`modules`, each as the parts of its name around layer numbers where it is chosen in every layer.

    ``[["model.layers.", ".mlp.up_proj"], ["lm_head"]]``: the first stands for one linear of every layer, the
    second, a single part, for itself. Nothing else of `every` fits the first.
    """
    every_like: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for module in every:
        every_like[tuple(_LAYER.split(module))].add(module)
    chosen: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for module in modules:
        chosen[tuple(_LAYER.split(module))].append(module)
    named: list[list[str]] = []
    for like, members in chosen.items():
        whole = len(members) > 1 and set(members) == every_like[like]
        named += [list(like)] if whole else [[module] for module in members]
    return named


def regex(parts: Sequence[str]) -> str:
    """A regular expression that matches the whole of the names that `parts` stand for."""
    return r"\d+".join(map(re.escape, parts)) + "$"


def unquantized(dense: Iterable[Sequence[str]]) -> dict[str, dict[str, str]]:
    """GPTQModel's ``dynamic`` for linears, named by `brief`, that stay as they are."""
    return {f"-:{regex(parts)}": {} for parts in dense}


def without_layer(module: str) -> str:
    """A linear's name with a star for each number of a layer or an expert."""
    return "*".join(_LAYER.split(module))
