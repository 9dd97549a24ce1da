"""Quantized activations as nodes of an OpenVINO graph, in float32.

OpenVINO's own FakeQuantize rounds to other points, and its plugin may then compute in int8 what the scales
do not allow; these nodes give the numbers of the reference and the speed of float32.
"""

import math

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from qtool.core.activation import FP8_MAX, LEAST_BLOCK, Activation
from qtool.core.fp4 import FP4_MAX


def fake_quantize(x: ov.Output, activation: Activation) -> ov.Output:
    """The inputs [T, K] as the rounded ones that stand for them."""
    scheme = activation.scheme
    if scheme.group_size is not None:
        groups = ops.reshape(x, _integers(0, -1, scheme.group_size), True).output(0)
        return ops.reshape(_round(groups, activation), _integers(0, -1), True).output(0)
    return _round(x, activation)


def _round(x: ov.Output, activation: Activation) -> ov.Output:
    if activation.scheme.kind == "nvfp4":
        return _round_nvfp4(x, activation)
    scale, zero_point = _range(x, activation)
    codes = ops.add(ops.divide(x, scale), zero_point)
    if activation.scheme.kind == "fp8":
        codes = _round_fp8(ops.clamp(codes, -FP8_MAX, FP8_MAX))
    else:
        codes = ops.round(ops.clamp(codes, -128.0, 127.0), "half_to_even")
    return ops.multiply(ops.subtract(codes, zero_point), scale).output(0)


def _round_nvfp4(x: ov.Output, activation: Activation) -> ov.Output:
    """e2m1 has steps of 1/2 up to 2, of 1 up to 4, of 2 up to 6; halves go to the even multiple of a step."""
    assert activation.scale is not None
    factor = _float(1 / activation.scale)
    largest = ops.reduce_max(ops.absolute(x), _integers(-1), True)
    block = ops.minimum(ops.multiply(factor, ops.divide(largest, _float(FP4_MAX))), _float(FP8_MAX))
    block = _round_fp8(block)
    scale = ops.divide(ops.select(ops.equal(block, _float(0)), _float(LEAST_BLOCK), block), factor)
    codes = ops.clamp(ops.divide(x, scale), -FP4_MAX, FP4_MAX)
    size, step = ops.absolute(codes), _float(2)
    for bound, finer in ((4, 1.0), (2, 0.5)):
        step = ops.select(ops.less(size, _float(bound)), _float(finer), step).output(0)
    codes = ops.multiply(ops.round(ops.divide(codes, step), "half_to_even"), step)
    return ops.multiply(codes, scale).output(0)


def _round_fp8(x: ov.Node) -> ov.Node:
    """The nearest float8_e4m3fn: three bits after the first, down to 2^-9.

    In arithmetic, since the plugin's own conversion (2026.4) loses bits before it rounds: 0.024416 becomes
    0.0234375, not 0.0253906.
    """
    size = ops.maximum(ops.absolute(x), _float(2.0**-6))
    exponent = ops.floor(ops.divide(ops.log(size), _float(math.log(2))))
    step = ops.power(_float(2), ops.subtract(exponent, _float(3)))
    return ops.multiply(ops.round(ops.divide(x, step), "half_to_even"), step)


def _range(x: ov.Output, activation: Activation) -> tuple[ov.Output, ov.Output]:
    """Scale and zero point, single numbers or [T, .., 1]."""
    if activation.scale is not None:
        return _float(activation.scale), _float(activation.zero_point)
    last = _integers(-1)
    if activation.scheme.symmetric:
        half = FP8_MAX if activation.scheme.kind == "fp8" else 127.5
        return _positive(ops.divide(ops.reduce_max(ops.absolute(x), last, True), _float(half))), _float(0)
    low = ops.minimum(ops.reduce_min(x, last, True), _float(0))
    high = ops.maximum(ops.reduce_max(x, last, True), _float(0))
    scale = _positive(ops.divide(ops.subtract(high, low), _float(255)))
    zero_point = ops.clamp(ops.subtract(_float(-128), ops.divide(low, scale)), -128.0, 127.0)
    return scale, ops.round(zero_point, "half_to_even").output(0)


def _positive(scale: ov.Node) -> ov.Output:
    """A token of zeros has no range: any scale gives zeros back."""
    return ops.select(ops.equal(scale, _float(0)), _float(1), scale).output(0)


def _float(value: float) -> ov.Output:
    return ops.constant(np.float32(value)).output(0)


def _integers(*values: int) -> ov.Output:
    return ops.constant(np.asarray(values, dtype=np.int64)).output(0)
