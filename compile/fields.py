"""Strict reading of config.json: a field that nobody asks for is an error, never skipped."""

import math
from collections.abc import Collection, Mapping
from typing import Never

from qtool.errors import QtoolError


class Fields:
    """The fields of one JSON object. A field that is absent or null has the default given, if any.

    Every error names the field, what it holds and what was wanted.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.where = where
        """What to put before a field's name in an error, such as ``model/config.json: ``."""
        self._values = values
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the field is there with a value; asking counts as reading it."""
        self._used.add(name)
        return self._values.get(name) is not None

    def says(self, name: str) -> bool:
        """Whether the field is there, null or not; where transformers tells null from absent."""
        self._used.add(name)
        return name in self._values

    def assume(self, name: str, value: object) -> None:
        """Read an absent field as if it were written with this value."""
        self._values = {name: value, **self._values}

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self._take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(name, "a positive whole number")
        return value

    def optional_integer(self, name: str, absent: int | None = None) -> int | None:
        """A positive whole number, or None when null; `absent` when absent."""
        return self.integer(name) if self.has(name) else None if self.says(name) else absent

    def count(self, name: str, default: int | None = None) -> int:
        """A whole number, zero or more."""
        value = self._take(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self.refuse(name, "a whole number from 0 on")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._take(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            self.refuse(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """true or false."""
        value = self._take(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._take(name, default)
        if not isinstance(value, str):
            self.refuse(name, "a string")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings."""
        value = self._take(name, None)
        if not isinstance(value, list):
            self.refuse(name, "a list of strings")
        return [str(item) for item in value]

    def numbers(self, name: str, count: int) -> list[float]:
        """A list of `count` positive numbers."""
        value = self._take(name, None)
        if not isinstance(value, list) or len(value) != count:
            self.refuse(name, f"a list of {count} positive numbers")
        if not all(
            isinstance(item, int | float) and not isinstance(item, bool) and 0 < item < math.inf
            for item in value
        ):
            self.refuse(name, "positive numbers alone")
        return [float(item) for item in value]

    def integers(self, name: str) -> list[int]:
        """A list of whole numbers, empty when absent."""
        value = self._take(name, [])
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            self.refuse(name, "a list of whole numbers")
        return list(value)

    def section(self, name: str) -> "Fields":
        """The fields of a nested object, none when it is absent; call its `finish` too."""
        value = self._take(name, {})
        if not isinstance(value, dict):
            self.refuse(name, "an object")
        return Fields(value, f"{self.where}{name}.")

    def only(self, name: str, *allowed: object) -> None:
        """Refuse a field that has any value but those `allowed`; absent is fine."""
        if self._take(name, allowed[0]) not in allowed:
            self.refuse(name, " or ".join(repr(value) for value in allowed) + ", all that is supported")

    def finish(self, harmless: Collection[str]) -> None:
        """Refuse the fields that were neither read nor named as `harmless`."""
        unknown = sorted(set(self._values) - self._used - set(harmless))
        if unknown:
            raise QtoolError(
                f"{self.where}{unknown[0]}: unknown field (value {self._values[unknown[0]]!r}), which may "
                "change the maths"
                + (f"; unknown too: {', '.join(unknown[1:])}" if unknown[1:] else "")
                + "; remove it if it has no effect"
            )

    def refuse(self, name: str, wanted: str) -> Never:
        """Raise: the field `name` holds something else than `wanted`."""
        if not self.has(name):
            raise QtoolError(f"{self.where}{name}: is missing, wanted {wanted}")
        raise QtoolError(f"{self.where}{name}: is {self._values[name]!r}, wanted {wanted}")

    def _take(self, name: str, default: object) -> object:
        self._used.add(name)
        value = self._values.get(name)
        return default if value is None else value
