"""Weights as TensorRT takes them: other readings of a checkpoint, before any graph is written."""

from dataclasses import dataclass, replace

import torch

from qtool.compile.code_products import stored_bits
from qtool.compile.codes import as_int4_pairs
from qtool.compile.decoder import Weights
from qtool.core.qtensor import Fp4Tensor, Linear, QuantizedTensor
from qtool.errors import QtoolError
from qtool.quantize.methods.grid import fit_grid


@dataclass(frozen=True)
class InRange:
    """`source`, each number of which float16 can hold: QtoolError names the first tensor with others.

    `where` names the checkpoint.
    """

    source: Weights
    where: str

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name`."""
        tensor = self.source.tensor(name)
        self._check(name, tensor)
        return tensor

    def linear(self, module: str) -> Linear:
        """The linear `module`."""
        linear = self.source.linear(module)
        weight = linear.weight
        if isinstance(weight, torch.Tensor):
            self._check(f"{module}.weight", weight)
        elif weight.scale.dtype.itemsize > 1:
            self._check(f"{module}'s scales", weight.scale)
        if linear.bias is not None:
            self._check(f"{module}.bias", linear.bias)
        return linear

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        largest = tensor.abs().max().item()
        if largest > torch.finfo(torch.float16).max:
            raise QtoolError(
                f"{self.where}: {name} reaches {largest:g}, more than the float16 that TensorRT computes "
                "in can hold; compile for openvino or onnx"
            )


@dataclass(frozen=True)
class SplitChannels:
    """`source` with 4-bit weights of one scale a channel in two groups of that scale.

    With one group tensorrt_rtx 1.7.1 writes such weights out in 16 bits at every step and reads them back,
    eight times the bytes; from two groups on it multiplies the packed codes. The numbers are the same.
    """

    source: Weights

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name`."""
        return self.source.tensor(name)

    def linear(self, module: str) -> Linear:
        """The linear `module`."""
        linear = self.source.linear(module)
        weight = linear.weight
        if not isinstance(weight, QuantizedTensor) or stored_bits(weight.scheme) != 4:
            return linear
        in_features, groups = weight.shape[1], weight.scale.shape[1]
        if groups > 1 or in_features % 2:
            return linear
        halves = QuantizedTensor(
            weight.codes,
            weight.scale.repeat(1, 2),
            None if weight.zero_point is None else weight.zero_point.repeat(1, 2),
            replace(weight.scheme, group_size=in_features // 2),
        )
        return replace(linear, weight=halves)


@dataclass(frozen=True)
class PairedFp4:
    """`source` with fp4 weights, whose inputs stay as they are, as two 4-bit integers each: the same numbers,
    with the inputs in twice.

    The bytes that an nvfp4 weight costs in a plan of tensorrt_rtx 1.7.1, and those that a decode step moves:

    ==============================  =====  ======
    fp4 constants, fp8 scales       0.562   4.562
    two 4-bit integers (taken)      1.250   1.250
    float16                         2.000   2.000
    ==============================  =====  ======

    Fp4 constants are known to GPUs of Blackwell alone, and multiplied as they are by fp4 inputs alone: else
    every step writes them out in 16 bits and reads them back. Pairs run on all GPUs, at twice the arithmetic,
    which prefill pays for.
    """

    source: Weights

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name`."""
        return self.source.tensor(name)

    def linear(self, module: str) -> Linear:
        """The linear `module`."""
        linear = self.source.linear(module)
        if not isinstance(linear.weight, Fp4Tensor) or linear.activation is not None:
            return linear
        order = torch.arange(linear.weight.shape[1]) if linear.order is None else linear.order
        return replace(linear, weight=as_int4_pairs(linear.weight), order=order.repeat(2))


@dataclass(frozen=True)
class SymmetricWeights:
    """Another reading of `source`, in which asymmetric weights are rounded again without zero points.

    Their signal to noise ratio, in decibel, is put in `errors` by module as they are read.
    """

    source: Weights
    errors: dict[str, float]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name`."""
        return self.source.tensor(name)

    def linear(self, module: str) -> Linear:
        """The linear `module`, its weight dense or symmetric."""
        linear = self.source.linear(module)
        if not isinstance(linear.weight, QuantizedTensor) or linear.weight.zero_point is None:
            return linear
        asymmetric = linear.weight.dequantize()
        scheme = replace(linear.weight.scheme, symmetric=True)
        symmetric = fit_grid(asymmetric, scheme, linear.weight.scale.dtype).quantize(asymmetric)
        noise = (symmetric.dequantize() - asymmetric).square().mean()
        self.errors[module] = round(float(10 * torch.log10(asymmetric.square().mean() / noise)), 2)
        return replace(linear, weight=symmetric)
