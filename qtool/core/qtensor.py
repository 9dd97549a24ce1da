"""Quantized tensors: codes with their scales, and the linear layer that holds one."""

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from qtool.core.activation import Activation
from qtool.core.fp4 import fp4_values
from qtool.core.schemes import Fp4Scheme, Fp8Scheme, IntScheme


@dataclass(frozen=True)
class QuantizedTensor:
    """A weight [N, K] as integers.

    codes [N, K] int8, scale [N, G] floating point, zero_point [N, G] int8 or None when symmetric;
    all three in the signed range of `scheme`. Nothing is packed here: packing belongs to a format.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    scheme: IntScheme

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        out_features, in_features = self.codes.shape
        return out_features, in_features

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the codes stand for, computed in float32."""
        out_features, in_features = self.codes.shape
        groups = self.scale.shape[1]
        codes = self.codes.view(out_features, groups, in_features // groups).float()
        if self.zero_point is not None:
            codes = codes - self.zero_point[..., None].float()
        return (codes * self.scale[..., None].float()).view(out_features, in_features).to(dtype)


@dataclass(frozen=True)
class Fp8Tensor:
    """A weight [N, K] as small floats: codes [N, K] float8_e4m3fn, scale [blocks of N, blocks of K].

    A class of its own, since it shares neither zero points nor groups of a channel with integers.
    """

    codes: Tensor
    scale: Tensor
    scheme: Fp8Scheme

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        out_features, in_features = self.codes.shape
        return out_features, in_features

    def by_row(self) -> "Fp8Tensor":
        """The same weight with scales of its own for each output, so that rows can be cut and stacked."""
        rows = self.scheme.rows or self.shape[0]
        scale = self.scale.repeat_interleave(rows, 0)[: self.shape[0]]
        return Fp8Tensor(self.codes, scale, Fp8Scheme(1, self.scheme.columns))

    def scales(self) -> Tensor:
        """float32 scales that broadcast over the codes: [N, 1 or K]."""
        scale = self.by_row().scale.float()
        if self.scheme.columns is None:
            return scale
        return scale.repeat_interleave(self.scheme.columns, 1)[:, : self.shape[1]]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the codes stand for, computed in float32."""
        return (self.codes.float() * self.scales()).to(dtype)


@dataclass(frozen=True)
class Fp4Tensor:
    """A weight [N, K] as e2m1 floats: ``global_scale * scale * fp4_values(codes)``.

    codes [N, K] uint8: the four bits of each, sign first, so 0 to 15 and not packed. scale [N, K / block] in
    the scheme's own dtype: float8_e4m3fn (nvfp4) or float8_e8m0fnu (mxfp4). global_scale is nvfp4's factor,
    [1] for the tensor or [N] where rows of several were stacked; None for mxfp4. It is float64: some formats
    store its reciprocal in float32, and so neither way of writing it loses anything.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None
    scheme: Fp4Scheme

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        out_features, in_features = self.codes.shape
        return out_features, in_features

    def by_row(self) -> "Fp4Tensor":
        """The same weight with a global scale of its own for each output: rows can be cut and stacked."""
        if self.global_scale is None:
            return self
        return replace(self, global_scale=self.global_scale.expand(self.shape[0]))

    def rows(self, own: slice) -> "Fp4Tensor":
        """Some of the outputs."""
        factor = self.by_row().global_scale
        return Fp4Tensor(
            self.codes[own], self.scale[own], None if factor is None else factor[own], self.scheme
        )

    def values(self) -> Tensor:
        """What the codes stand for before any scale: float32 [N, K]."""
        return fp4_values(self.codes)

    def scales(self) -> Tensor:
        """float32 scales [N, K / block], the global one multiplied in."""
        if self.global_scale is None:
            return self.scale.float()
        return (self.scale.double() * self.global_scale[:, None]).float()

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] that the codes stand for, computed in float32."""
        out_features, in_features = self.shape
        blocks = self.values().view(out_features, -1, self.scheme.group_size)
        return (blocks * self.scales()[..., None]).view(out_features, in_features).to(dtype)


Quantized: TypeAlias = QuantizedTensor | Fp8Tensor | Fp4Tensor
Weight: TypeAlias = Tensor | Quantized


@dataclass(frozen=True)
class Linear:
    """A linear layer as a checkpoint holds it: ``x[:, order] @ weight.T + bias``, x rounded first.

    weight [N, K], dense or quantized, and bias [N] or None.
    """

    weight: Weight
    bias: Tensor | None
    order: Tensor | None = None
    """[K] int64: the input that each column of `weight` multiplies; None: in order.

    GPTQ's activation order puts inputs from anywhere into one group. With the inputs reordered instead,
    groups lie side by side, which is all that kernels know; reordering costs one gather of the inputs.
    """
    activation: Activation | None = None
    """How the inputs are rounded before the product; None: not at all."""

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [N, K] as numbers, its columns in the order of the inputs."""
        weight = self.weight.to(dtype) if isinstance(self.weight, Tensor) else self.weight.dequantize(dtype)
        return weight if self.order is None else weight[:, self.order.argsort()]


@dataclass(frozen=True)
class KvScales:
    """The calibrated scales of one attention's keys and values, float32, each [1] or [KV heads]."""

    key: Tensor
    value: Tensor
