"""What a comparison finds: a linear, or another tensor, on both sides."""

from pydantic import BaseModel, ConfigDict

from qtool.core.manifest import LinearRecord


class Side(BaseModel):
    """What one of the two makes of a linear, or of another tensor."""

    model_config = ConfigDict(frozen=True)

    scheme: str
    """Its number format, such as ``int4 symmetric, group 64``; for plain numbers the dtype."""
    num_bits: int
    record: LinearRecord | None = None
    """What its manifest says of it."""


class Difference(BaseModel):
    """One linear, or another tensor, in both. What could not be compared is null."""

    model_config = ConfigDict(frozen=True)

    name: str
    a: Side | None
    """Null: only the other has it."""
    b: Side | None
    same_format: bool | None = None
    """Whether both schemes mean the same, however formats spell it; null where only one has it."""
    same_codes: bool | None = None
    """Whether codes, scales and zero points are equal; null unless both are quantized to one format."""
    max_abs: float | None = None
    """The largest difference of a weight."""
    mean_abs: float | None = None
    relative: float | None = None
    """Root mean square of the difference, relative to that of a's weights."""

    @property
    def same(self) -> bool:
        """Whether nothing differs that was compared."""
        return (
            bool(self.same_format) and not self.max_abs and (self.max_abs is not None or _records_equal(self))
        )


def _records_equal(one: Difference) -> bool:
    return one.a is not None and one.b is not None and one.a.record == one.b.record
