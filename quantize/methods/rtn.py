"""Round to nearest, in every number format."""

import torch
from torch import Tensor

from qtool.core.qtensor import Quantized
from qtool.core.schemes import Fp8Scheme, IntScheme, WeightScheme
from qtool.quantize.methods.clip import search_range
from qtool.quantize.methods.floats import (
    quantize_fp8,
    quantize_mxfp4,
    quantize_nvfp4,
    shared_nvfp4_scale,
)
from qtool.quantize.methods.grid import fit_grid


def rtn(
    weight: Tensor,
    scheme: WeightScheme,
    dtype: torch.dtype,
    *,
    search: bool = False,
    importance: Tensor | None = None,
    shared: Tensor | None = None,
) -> Quantized:
    """Round a weight [N, K] with the range of each group; scales are stored in `dtype`, or the format's own.

    `search` looks for the ranges of least square error, each column weighed by `importance` [K] if given (fp8
    has nothing to search: its steps shrink with the numbers). `shared` is the scale of a whole tensor that
    linears which engines fuse have in common, see `floats`.
    """
    if isinstance(scheme, IntScheme):
        grid = search_range(weight, scheme, dtype, importance) if search else fit_grid(weight, scheme, dtype)
        return grid.quantize(weight)
    if isinstance(scheme, Fp8Scheme):
        return quantize_fp8(weight, scheme, dtype, shared)
    if scheme.kind == "mxfp4":
        return quantize_mxfp4(weight, importance=importance)
    scale = shared_nvfp4_scale([weight]) if shared is None else shared
    return quantize_nvfp4(weight, scale, search=search, importance=importance)
