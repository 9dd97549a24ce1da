"""What all bodies that clients send have in common. What is not supported is refused by name."""

import re
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, JsonValue, model_validator

from qtool.errors import nearest
from qtool.runtime.request import ParameterError

JsonObject = dict[str, JsonValue]

_SURROGATE = re.compile("[\ud800-\udfff]")


class Body(BaseModel):
    """A request body. A null is an absent field; an unknown field, or one whose value asks for something
    that is not supported, raises ParameterError.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    no_effect: ClassVar[dict[str, tuple[object, ...]]] = {}
    """Known fields that are not supported, with the values by which a client asks for nothing."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if not is_text(data):
            raise ParameterError("body", "holds half of a UTF-16 pair, which is no text; send valid Unicode")
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        kept = {}
        for name, value in data.items():
            if value is None or any(_same(value, nothing) for nothing in cls.no_effect.get(name, ())):
                continue
            if name in cls.no_effect:
                raise ParameterError(
                    name, f"{value!r:.80} is not supported by this server; leave the field out"
                )
            if name not in fields:
                raise ParameterError(
                    name, f"is no field of this request; {nearest(name, fields.union(cls.no_effect))}"
                )
            kept[name] = value
        return kept


def _same(value: object, other: object) -> bool:
    """Equal, and not one a truth value and the other a number."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def is_text(value: object) -> bool:
    """Whether every string within is Unicode: JSON can escape half of a UTF-16 pair."""
    if isinstance(value, str):
        return _SURROGATE.search(value) is None
    if isinstance(value, dict):
        return all(is_text(key) and is_text(item) for key, item in value.items())
    return not isinstance(value, list) or all(is_text(item) for item in value)
