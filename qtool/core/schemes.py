"""Number formats: what a weight's codes mean. How the numbers are chosen is a method's business."""

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True)
class IntScheme:
    """Signed integers with one scale for each group of `group_size` inputs of an output channel.

    A weight is ``scale * (code - zero_point)``; codes and zero points lie in ``[low, high]``.
    `group_size` None means one group for the whole channel.
    """

    num_bits: int
    group_size: int | None
    symmetric: bool

    @property
    def low(self) -> int:
        """The smallest code."""
        return -(1 << (self.num_bits - 1))

    @property
    def high(self) -> int:
        """The largest code."""
        return (1 << (self.num_bits - 1)) - 1

    def num_groups(self, in_features: int) -> int:
        """G, the number of groups of a channel with K = `in_features` inputs."""
        return 1 if self.group_size is None else in_features // self.group_size

    def __str__(self) -> str:
        group = "channel" if self.group_size is None else f"group {self.group_size}"
        return f"int{self.num_bits} {'symmetric' if self.symmetric else 'asymmetric'}, {group}"


@dataclass(frozen=True)
class Fp8Scheme:
    """Codes in float8_e4m3fn with one scale for each block of `rows` outputs by `columns` inputs.

    A weight is ``scale * code``. None means all of them: (1, None) is a scale a channel, (None, None) one
    for the tensor. Blocks at the edges may be cut short.
    """

    rows: int | None
    columns: int | None

    num_bits = 8

    def grid(self, out_features: int, in_features: int) -> tuple[int, int]:
        """The blocks of a weight [N, K] in each dimension: the shape of its scales."""
        rows, columns = self.rows or out_features, self.columns or in_features
        return -(-out_features // rows), -(-in_features // columns)

    def __str__(self) -> str:
        if self.columns is None:
            return f"fp8, {'tensor' if self.rows is None else 'channel'}"
        return f"fp8, {f'group {self.columns}' if self.rows == 1 else f'block {self.rows}x{self.columns}'}"


@dataclass(frozen=True)
class Fp4Scheme:
    """Codes in e2m1 (0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign) with one scale for each block of inputs.

    mxfp4: blocks of 32 inputs, scales that are powers of two (e8m0); a weight is ``scale * code`` (OCP
    Microscaling Formats 1.0, section 5). nvfp4: blocks of 16, scales in float8_e4m3fn, and one float32 number
    for the tensor beside them; a weight is ``global_scale * scale * code``. A block has to divide the inputs.
    """

    kind: Literal["nvfp4", "mxfp4"]

    num_bits = 4

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return 16 if self.kind == "nvfp4" else 32

    def __str__(self) -> str:
        return f"{self.kind}, group {self.group_size}"


@dataclass(frozen=True)
class ActivationScheme:
    """How a linear's inputs are rounded before its product.

    Dynamic: with the range of each token as it comes, or of each `group_size` of its inputs. Static: with
    one range that the checkpoint gives. fp8 is always symmetric. nvfp4 rounds like the weights of that name:
    each 16 inputs by their range as it comes, in steps of the checkpoint's one global scale.
    """

    kind: Literal["int8", "fp8", "nvfp4"]
    dynamic: bool
    symmetric: bool = True
    group_size: int | None = None

    @property
    def calibrated(self) -> bool:
        """Whether a scale of it has to be known beforehand: the static range, or nvfp4's global scale."""
        return self.kind == "nvfp4" or not self.dynamic

    def __str__(self) -> str:
        if self.kind == "nvfp4":
            return "nvfp4 activations"
        group = f" group {self.group_size}" if self.group_size else ""
        return f"{self.kind} {f'per token{group}' if self.dynamic else 'static'} activations" + (
            "" if self.symmetric else ", asymmetric"
        )


NVFP4_ACTIVATIONS = ActivationScheme("nvfp4", dynamic=True, group_size=16)
"""The only ones of their kind."""

WeightScheme: TypeAlias = IntScheme | Fp8Scheme | Fp4Scheme


@dataclass(frozen=True)
class KvCacheScheme:
    """How keys and values are stored between steps: symmetric, with calibrated scales.

    One scale for the keys and one for the values of each layer, or of each KV head of each layer.
    """

    kind: Literal["int8", "fp8"]
    per_head: bool = False

    def __str__(self) -> str:
        return f"{self.kind} KV cache, a scale {'a head' if self.per_head else 'a layer'}"


@dataclass(frozen=True)
class LinearScheme:
    """What a quantized linear computes with; `activation` None: inputs as they come."""

    weight: WeightScheme
    activation: ActivationScheme | None = None

    def __str__(self) -> str:
        return f"{self.weight}" + (f"; {self.activation}" if self.activation else "")
