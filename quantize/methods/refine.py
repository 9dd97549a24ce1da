"""Lower the output error ``tr(ΔW H ΔWᵀ)`` of a weight that is quantized already: its scales, then its codes.

Both steps are exact descents of each row's quadratic error, so neither can raise it, but for a scale's
rounding to the dtype that is stored: coordinate descent over codes as in QuantEase (Behdin et al. 2023,
arXiv:2309.01885, section 3), and least squares over scales, which GPTQ fixes before it chooses a code.
"""

import torch
from torch import Tensor

from qtool.core.qtensor import QuantizedTensor
from qtool.quantize.methods.grid import grouped
from qtool.quantize.methods.order import reordered

_ROWS = 512
"""Rows whose normal equations are held at once."""


def refine(
    weight: Tensor, quantized: QuantizedTensor, hessian: Tensor, sweeps: int, block_size: int
) -> QuantizedTensor:
    """`sweeps` times both steps, for a weight [N, K] and a positive definite hessian [K, K]."""
    for _ in range(sweeps):
        quantized = refit_scales(weight, quantized, hessian)
        quantized = descend(weight, quantized, hessian, block_size)
    return quantized


def refit_scales(weight: Tensor, quantized: QuantizedTensor, hessian: Tensor) -> QuantizedTensor:
    """The scales of least output error for the codes as they are.

    For each row, with c_g its codes in group g less their zero point: the normal equations
    ``Σ_h (c_g H_gh c_h) s_h = c_g (H w)_g``. A scale that would leave half to twice its value stays: codes
    were not chosen for that.
    """
    centred = quantized.codes.float()
    if quantized.zero_point is not None:
        centred = (grouped(centred, quantized.scheme) - quantized.zero_point[..., None].float()).flatten(1)
    old = quantized.scale.float()
    chunks = [slice(start, start + _ROWS) for start in range(0, len(weight), _ROWS)]
    new = torch.cat([_least_squares(weight[rows], centred[rows], old[rows], hessian) for rows in chunks])
    new = torch.where((new > old / 2) & (new < 2 * old), new, old)
    return QuantizedTensor(
        quantized.codes, new.to(quantized.scale.dtype), quantized.zero_point, quantized.scheme
    )


def _least_squares(weight: Tensor, centred: Tensor, old: Tensor, hessian: Tensor) -> Tensor:
    out_features, groups = old.shape
    size = weight.shape[1] // groups
    products = torch.empty(out_features, groups, groups, device=old.device)
    for group in range(groups):
        columns = slice(group * size, (group + 1) * size)
        made = centred[:, columns] @ hessian[columns]
        products[:, :, group] = (made * centred).view(out_features, groups, size).sum(-1)
    wanted = ((weight @ hessian) * centred).view(out_features, groups, size).sum(-1)
    # A group of zero codes has no say in its scale: this keeps the old one, and moves no other.
    diagonal = products.diagonal(dim1=1, dim2=2)
    ridge = 1e-6 * diagonal.mean(1, keepdim=True) + torch.finfo(torch.float32).tiny
    damped = products + torch.diag_embed(ridge.expand_as(diagonal))
    solution, failed = torch.linalg.solve_ex(damped, wanted + ridge * old)
    return torch.where((failed == 0)[:, None], solution, old)


def descend(weight: Tensor, quantized: QuantizedTensor, hessian: Tensor, block_size: int) -> QuantizedTensor:
    """One sweep over the columns, each code set to its best given all others; loudest inputs first.

    The gradient ``ΔW H`` is kept up to date for the columns still to come: at once within a block of them,
    for the rest when the block is done. Columns are held as rows, since one is read and written at a time.
    """
    in_features = weight.shape[1]
    scheme, groups = quantized.scheme, quantized.scale.shape[1]
    order = hessian.diagonal().argsort(descending=True, stable=True)
    hessian = reordered(hessian, order)
    diagonal, group = hessian.diagonal().tolist(), (order // (in_features // groups)).tolist()
    scale = quantized.scale.float().T.contiguous()
    codes = quantized.codes.T[order].float()
    gradient = hessian @ (quantized.dequantize() - weight).T[order]
    for start in range(0, in_features, block_size):
        end = min(start + block_size, in_features)
        block, inner = gradient[start:end], hessian[start:end, start:end]
        change = torch.empty_like(block)
        for place, column in enumerate(range(start, end)):
            step = scale[group[column]]
            best = torch.addcdiv(codes[column], block[place], step, value=-1 / diagonal[column])
            best.round_().clamp_(scheme.low, scheme.high)
            torch.mul(best - codes[column], step, out=change[place])
            codes[column] = best
            block[place + 1 :].addr_(inner[place + 1 :, place], change[place])
        gradient[end:].addmm_(hessian[end:, start:end], change)
    found = torch.empty_like(quantized.codes)
    found[:, order] = codes.T.to(torch.int8)
    return QuantizedTensor(found, quantized.scale, quantized.zero_point, scheme)
