"""Lower the output error ``tr(ΔW H ΔWᵀ)`` of a weight that is quantized already: its scales, then its codes.

Both steps are exact descents of each row's quadratic error, so neither can raise it, but for a scale's
rounding to the dtype that is stored: coordinate descent over codes as in QuantEase (Behdin et al. 2023,
arXiv:2309.01885, section 3), and least squares over scales, which GPTQ fixes before it chooses a code.
"""

import torch
from torch import Tensor

from qtool.core.qtensor import Quantized, QuantizedTensor
from qtool.quantize.methods.grid import grouped
from qtool.quantize.methods.order import reordered
from qtool.quantize.methods.points import points_of

_ROWS = 512
"""Rows whose normal equations are held at once."""


def refine(weight: Tensor, quantized: Quantized, hessian: Tensor, sweeps: int, block_size: int) -> Quantized:
    """`sweeps` times both steps, for a weight [N, K] and a positive definite hessian [K, K].

    Small floats keep their scales: those of blocks are floats of few digits themselves.
    """
    if not sweeps:
        return quantized
    wanted = weight @ hessian
    order = hessian.diagonal().argsort(descending=True, stable=True)
    ordered = reordered(hessian, order)
    for _ in range(sweeps):
        if isinstance(quantized, QuantizedTensor):
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
    quantized: Quantized, hessian: Tensor, order: Tensor, wanted: Tensor, block_size: int
) -> Quantized:
    """One sweep over the columns in `order` [K], each code set to its best given all others.

    `hessian` [K, K] is in that order, `wanted`, ``W H`` [N, K], in the weight's. The gradient ``ΔW H`` is
    brought up to date for a column when its turn comes, by the changes before it in its block; for the blocks
    to come when the block is done. Columns are held as rows, since one is read and written at a time.
    """
    in_features, points = len(order), points_of(quantized)
    diagonal, group = hessian.diagonal().tolist(), (order // points.columns).tolist()
    steps = points.steps.unbind()
    numbers = points.numbers().T[order]
    gradient = torch.addmm(wanted.T[order], hessian, quantized.dequantize().T[order], beta=-1)
    for start in range(0, in_features, block_size):
        end = min(start + block_size, in_features)
        block, inner = gradient[start:end], hessian[start:end, start:end]
        change = torch.empty_like(block)
        columns = zip(block.unbind(), numbers[start:end].unbind(), change.unbind(), strict=True)
        for place, (slope, number, changed) in enumerate(columns):
            own = group[start + place]
            if place:
                slope.addmv_(change[:place].T, inner[place, :place])
            best = torch.addcdiv(number, slope, steps[own], value=-1 / diagonal[start + place])
            points.nearest_(best, own)
            torch.sub(best, number, out=changed).mul_(steps[own])
            number.copy_(best)
        gradient[end:].addmm_(hessian[end:, start:end], change)
    found = torch.empty_like(numbers)
    found[order] = numbers
    return points.tensor(found.T)
