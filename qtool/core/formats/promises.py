"""What a ``quantization_config`` says, what is stored and what is read, held against each other."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from qtool.errors import QtoolError

if TYPE_CHECKING:
    from qtool.core.formats.contract import QuantizationFormat
    from qtool.core.formats.tensors import StoredModel

_SCALES = (".weight_scale", ".scales", ".weight_scale_inv")
"""Ends of the names of what every quantized linear has, in one format or another."""


def scaled(names: Iterable[str]) -> Iterator[str]:
    """The modules among stored `names` that have scales."""
    return (name.rpartition(".")[0] for name in names if name.endswith(_SCALES))


def refuse_unknown(config: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise QtoolError for a key that is not `known`, unless its value switches it off.

    `where` is the object that holds it.
    """
    for key, value in config.items():
        if key not in known and value:
            raise QtoolError(
                f"{where}.{key}: unknown key (value {value!r}), which may change the weights; remove it "
                "if it has no effect"
            )


def refuse_unread(checkpoint: "StoredModel", reader: "QuantizationFormat") -> None:
    """Raise QtoolError for a stored part of a quantized linear that `reader` would pass over."""
    read = {
        module: {*reader.parts(module), "bias"} for module in scaled(checkpoint) if reader.quantizes(module)
    }
    for name in checkpoint:
        module, _, part = name.rpartition(".")
        if module in read and part not in read[module]:
            raise QtoolError(
                f"{checkpoint.path}: {name} is stored, but as {reader.scheme(module)} the linear is "
                f"{', '.join(sorted(read[module] - {'bias'}))}; config.json does not say what it is for"
            )


def refuse_exempt(checkpoint: "StoredModel", names: Iterable[str], where: str) -> None:
    """Raise QtoolError for a linear that is quantized though `names` exempt it; `where` is their field.

    They may be any part of a dotted name, or have stars.
    """
    names = tuple(names)
    for module in scaled(checkpoint):
        for name in names:
            if f".{name}." in f".{module}." or ("*" in name and fnmatchcase(module, name)):
                raise QtoolError(
                    f"{where} names {name!r}, but {module} is quantized; fetch the checkpoint again"
                )


def refuse_dynamic(checkpoint: "StoredModel", dynamic: Mapping[str, Any] | None, where: str) -> None:
    """Raise QtoolError for a ``dynamic`` of GPTQModel that does more than exempt linears, by patterns after
    ``-:``, and for an exempt one that is quantized."""
    for pattern in dynamic or ():
        if not pattern.startswith("-"):
            raise QtoolError(f"{where}.dynamic gives modules formats of their own, which is not supported")
        for module in scaled(checkpoint):
            if re.match(pattern.removeprefix("-").removeprefix(":"), module):
                raise QtoolError(f"{where}.dynamic exempts {module} by {pattern!r}, but it is quantized")
