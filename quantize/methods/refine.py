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
    if not sweeps:
        return quantized
    wanted = weight @ hessian
    order = hessian.diagonal().argsort(descending=True, stable=True)
    ordered = reordered(hessian, order)
    for _ in range(sweeps):
        quantized = refit_scales(quantized, hessian, wanted)
        quantized = descend(quantized, ordered, order, wanted, block_size)
    return quantized


def refit_scales(quantized: QuantizedTensor, hessian: Tensor, wanted: Tensor) -> QuantizedTensor:
    """The scales of least output error for the codes as they are, given `wanted`, ``W H`` [N, K].

    For each row, with c_g its codes in group g less their zero point: the normal equations
    ``Σ_h (c_g H_gh c_h) s_h = c_g (H w)_g``. A scale that would leave half to twice its value stays: codes
    were not chosen for that.
    """
    centred = quantized.codes.float()
    if quantized.zero_point is not None:
        centred = (grouped(centred, quantized.scheme) - quantized.zero_point[..., None].float()).flatten(1)
    old = quantized.scale.float()
    chunks = [slice(start, start + _ROWS) for start in range(0, len(wanted), _ROWS)]
    new = torch.cat([_least_squares(wanted[rows], centred[rows], old[rows], hessian) for rows in chunks])
    new = torch.where((new > old / 2) & (new < 2 * old), new, old)
    return QuantizedTensor(
        quantized.codes, new.to(quantized.scale.dtype), quantized.zero_point, quantized.scheme
    )


def _least_squares(wanted: Tensor, centred: Tensor, old: Tensor, hessian: Tensor) -> Tensor:
    out_features, groups = old.shape
    size = wanted.shape[1] // groups
    products = torch.empty(out_features, groups, groups, device=old.device)
    for group in range(groups):  # products are symmetric: half of them are computed
        start, end = group * size, (group + 1) * size
        made = (centred[:, start:end] @ hessian[start:end, start:]).mul_(centred[:, start:])
        products[:, group:, group] = made.view(out_features, -1, size).sum(-1)
        products[:, group, group:] = products[:, group:, group]
    target = (wanted * centred).view(out_features, groups, size).sum(-1)
    # A group of zero codes has no say in its scale: this keeps the old one, and moves no other.
    diagonal = products.diagonal(dim1=1, dim2=2)
    ridge = 1e-6 * diagonal.mean(1, keepdim=True) + torch.finfo(torch.float32).tiny
    damped = products + torch.diag_embed(ridge.expand_as(diagonal))
    solution, failed = torch.linalg.solve_ex(damped, target + ridge * old)
    return torch.where((failed == 0)[:, None], solution, old)


def descend(
    quantized: QuantizedTensor, hessian: Tensor, order: Tensor, wanted: Tensor, block_size: int
) -> QuantizedTensor:
    """One sweep over the columns in `order` [K], each code set to its best given all others.

    `hessian` [K, K] is in that order, `wanted`, ``W H`` [N, K], in the weight's. The gradient ``ΔW H`` is
    brought up to date for a column when its turn comes, by the changes before it in its block; for the blocks
    to come when the block is done. Columns are held as rows, since one is read and written at a time.
    """
    in_features = len(order)
    scheme, groups = quantized.scheme, quantized.scale.shape[1]
    diagonal, group = hessian.diagonal().tolist(), (order // (in_features // groups)).tolist()
    steps = quantized.scale.float().T.contiguous().unbind()
    codes = quantized.codes.T[order].float()
    gradient = torch.addmm(wanted.T[order], hessian, quantized.dequantize().T[order], beta=-1)
    for start in range(0, in_features, block_size):
        end = min(start + block_size, in_features)
        block, inner = gradient[start:end], hessian[start:end, start:end]
        change = torch.empty_like(block)
        columns = zip(block.unbind(), codes[start:end].unbind(), change.unbind(), strict=True)
        for place, (slope, code, changed) in enumerate(columns):
            step = steps[group[start + place]]
            if place:
                slope.addmv_(change[:place].T, inner[place, :place])
            best = torch.addcdiv(code, slope, step, value=-1 / diagonal[start + place])
            best.round_().clamp_(scheme.low, scheme.high)
            torch.sub(best, code, out=changed).mul_(step)
            code.copy_(best)
        gradient[end:].addmm_(hessian[end:, start:end], change)
    found = torch.empty_like(quantized.codes)
    found[:, order] = codes.T.to(torch.int8)
    return QuantizedTensor(found, quantized.scale, quantized.zero_point, scheme)
