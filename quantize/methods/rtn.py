"""Round to nearest."""

import torch
from torch import Tensor

from qtool.core.qtensor import QuantizedTensor
from qtool.core.recipe import Rtn
from qtool.core.schemes import IntScheme
from qtool.quantize.methods.clip import search_clip
from qtool.quantize.methods.grid import fit_grid


def rtn(weight: Tensor, scheme: IntScheme, options: Rtn, dtype: torch.dtype) -> QuantizedTensor:
    """Round a weight [N, K] to the grid of each group's range; scales are stored in `dtype`."""
    ratio = search_clip(weight, scheme, dtype, None) if options.search_range else 1.0
    return fit_grid(weight, scheme, dtype, ratio).quantize(weight)
