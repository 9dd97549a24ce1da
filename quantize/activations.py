"""The ranges that rounded activations need from calibration."""

from qtool.calibrate.statistics import InputStatistics
from qtool.core.activation import FP8_MAX, Activation
from qtool.core.fp4 import FP4_MAX
from qtool.core.schemes import ActivationScheme


def calibrated(scheme: ActivationScheme | None, seen: InputStatistics | None) -> Activation | None:
    """How a linear's inputs are rounded, by what it has seen: static schemes get the whole range of it.

    None for a linear whose inputs are not rounded. Inputs of zero alone get scale 1. What rounds each token
    by its own range may be unseen.
    """
    if scheme is None:
        return None
    if not scheme.calibrated:
        return Activation(scheme)
    assert seen is not None  # the plan saw to that
    largest = float(seen.max_abs.max())
    if scheme.kind == "nvfp4":
        return Activation(scheme, largest / (FP4_MAX * FP8_MAX) or 1.0)
    if scheme.symmetric:
        steps = 2 * FP8_MAX if scheme.kind == "fp8" else 255.0
        return Activation(scheme, largest / (steps / 2) or 1.0)
    low, high = min(float(seen.low.min()), 0.0), max(float(seen.high.max()), 0.0)
    scale = (high - low) / 255.0 or 1.0
    return Activation(scheme, scale, round(min(max(-128 - low / scale, -128), 127)))
