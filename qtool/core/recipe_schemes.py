"""The part of a recipe that names number formats: of weights, of activations and of the KV cache."""

from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, model_validator

from qtool.core.schemes import ActivationScheme, Fp4Scheme, Fp8Scheme, IntScheme, KvCacheScheme


class Frozen(BaseModel):
    """A part of a recipe: checked once, never changed, and without keys that nothing reads.

    Its numbers are finite: a manifest, which holds the recipe, is JSON, and that has no others.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class IntWeights(Frozen):
    """Integers with a scale for each group of inputs, and what to try where a group does not divide."""

    format: Literal["int"] = "int"
    num_bits: Literal[3, 4, 8] = 4
    group_size: int | None = Field(128, ge=8, description="inputs that share a scale; null: the channel")
    group_size_fallback: tuple[Annotated[int, Field(ge=8)], ...] = Field(
        (), description="tried in order where group_size does not divide in_features"
    )
    symmetric: bool = True

    @model_validator(mode="after")
    def _fallback_has_a_use(self) -> Self:
        if self.group_size is None and self.group_size_fallback:
            raise ValueError("group_size null fits every linear, so group_size_fallback has no use; drop one")
        return self

    @property
    def group_sizes(self) -> tuple[int | None, ...]:
        """The sizes to try, in order."""
        return self.group_size, *self.group_size_fallback

    def scheme(self, in_features: int) -> IntScheme | None:
        """The first of the group sizes that divides `in_features`; None when none does."""
        for size in self.group_sizes:
            if size is None or in_features % size == 0:
                return IntScheme(self.num_bits, size, self.symmetric)
        return None


class Fp8Weights(Frozen):
    """float8_e4m3fn with a scale for each channel, each block of 128x128, or the whole tensor."""

    format: Literal["fp8"] = "fp8"
    granularity: Literal["channel", "block", "tensor"] = "channel"

    group_sizes: ClassVar[tuple[int | None, ...]] = (None,)

    def scheme(self, in_features: int) -> Fp8Scheme:
        """Fits every linear: blocks at the edges may be cut short."""
        shapes = {"channel": (1, None), "block": (128, 128), "tensor": (None, None)}
        return Fp8Scheme(*shapes[self.granularity])


class Fp4Weights(Frozen):
    """e2m1 floats: mxfp4 in blocks of 32, nvfp4 in blocks of 16."""

    format: Literal["mxfp4", "nvfp4"]

    @property
    def group_sizes(self) -> tuple[int | None, ...]:
        """The format's own block."""
        return (Fp4Scheme(self.format).group_size,)

    def scheme(self, in_features: int) -> Fp4Scheme | None:
        """None when the format's block does not divide `in_features`."""
        scheme = Fp4Scheme(self.format)
        return None if in_features % scheme.group_size else scheme


def _of_format(value: Any) -> Any:
    """A name alone takes a format's defaults; integers need no name."""
    if isinstance(value, str):
        return {"format": value}
    return {"format": "int", **value} if isinstance(value, dict) else value


WeightFormat: TypeAlias = Annotated[
    Annotated[IntWeights | Fp8Weights | Fp4Weights, Discriminator("format")],
    BeforeValidator(
        _of_format,
        json_schema_input_type=Literal["int", "fp8", "mxfp4", "nvfp4"] | IntWeights | Fp8Weights | Fp4Weights,
    ),
]
"""The number format of weights: a mapping, or a name alone."""


class ActivationFormat(Frozen):
    """How the inputs of a linear are rounded before its product."""

    format: Literal["int8", "fp8"]
    dynamic: bool = Field(True, description="each token by its own range; false: one calibrated range")
    symmetric: bool = Field(True, description="int8 may do without; fp8 always is")
    group_size: int | None = Field(None, ge=8, description="inputs of a token that share a range; null: all")

    @model_validator(mode="after")
    def _runs(self) -> Self:
        if self.format == "fp8" and not self.symmetric:
            raise ValueError("fp8 has no zero points; drop symmetric: false")
        if self.group_size is not None and not self.dynamic:
            raise ValueError(
                "group_size is for dynamic activations; a calibrated range is one for the tensor"
            )
        return self

    @property
    def scheme(self) -> ActivationScheme:
        """The same, as engines know it."""
        return ActivationScheme(self.format, self.dynamic, self.symmetric, self.group_size)


class KvCacheFormat(Frozen):
    """How keys and values are stored between steps, with calibrated scales."""

    format: Literal["int8", "fp8"]
    granularity: Literal["tensor", "head"] = Field("tensor", description="what shares a scale, in each layer")

    @property
    def scheme(self) -> KvCacheScheme:
        """The same, as engines know it."""
        return KvCacheScheme(self.format, per_head=self.granularity == "head")


def _named(value: Any) -> Any:
    return {"format": value} if isinstance(value, str) else value


Activations: TypeAlias = Annotated[
    ActivationFormat,
    BeforeValidator(_named, json_schema_input_type=Literal["int8", "fp8"] | ActivationFormat),
]
KvCache: TypeAlias = Annotated[
    KvCacheFormat, BeforeValidator(_named, json_schema_input_type=Literal["int8", "fp8"] | KvCacheFormat)
]
