"""Round to nearest for weights that are small floats: fp8, mxfp4 and nvfp4.

Numbers beyond the largest of a format become the largest. Engines that fuse linears over one input (q, k and
v; gate and up) know one scale for the tensor of them all, which `shared_fp8_scale` and `shared_nvfp4_scale`
give.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from qtool.core.activation import FP8_MAX
from qtool.core.fp4 import FP4_MAX, fp4_codes, fp4_values
from qtool.core.qtensor import Fp4Tensor, Fp8Tensor
from qtool.core.schemes import Fp4Scheme, Fp8Scheme
from qtool.quantize.methods.grid import stored_scale

_LEAST_E4M3 = 2.0**-9
_RATIOS = tuple(2 ** (step / 8) for step in range(-5, 6))
"""Block scales to try, as factors of ``largest / 6``. Up to ``largest / 4``: 4 and 6 are further apart than
the codes below (Cook et al. 2025, arXiv:2512.02010). As far down: the largest is clipped, the others get
finer."""


def shared_fp8_scale(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[1, 1] in `dtype`: the scale with which every number of all of the weights fits."""
    return stored_scale(_largest(weights) / FP8_MAX, dtype).view(1, 1)


def quantize_fp8(
    weight: Tensor, scheme: Fp8Scheme, dtype: torch.dtype, scale: Tensor | None = None
) -> Fp8Tensor:
    """Round a weight [N, K] with the range of each block, or with a given `scale` of the grid's shape."""
    rows, columns = scheme.rows or weight.shape[0], scheme.columns or weight.shape[1]
    if scale is None:
        padding = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)
        padded = torch.nn.functional.pad(weight, padding)
        blocks = padded.view(-1, rows, padded.shape[1] // columns, columns)
        scale = stored_scale(blocks.abs().amax((1, 3)) / FP8_MAX, dtype)
    wide = scale.float().repeat_interleave(rows, 0)[: weight.shape[0]]
    wide = wide.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    codes = (weight / wide).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Fp8Tensor(codes, scale, scheme)


def shared_nvfp4_scale(weights: Sequence[Tensor]) -> Tensor:
    """[1] float64: nvfp4's global scale with which the block scales of all the weights fit in float8_e4m3fn.

    The next power of two: formats that store its reciprocal then hold the same number, and no product with
    it is rounded. e4m3 has as many digits wherever that puts the largest block, so nothing is lost.
    """
    largest = _largest(weights).double()
    if largest == 0:
        return torch.ones(1, dtype=torch.float64, device=largest.device)
    return torch.exp2(torch.ceil(torch.log2(largest / (FP4_MAX * FP8_MAX)))).view(1)


def quantize_nvfp4(
    weight: Tensor, global_scale: Tensor, *, search: bool = False, importance: Tensor | None = None
) -> Fp4Tensor:
    """Round a weight [N, K] in blocks of 16 inputs, each with a float8_e4m3fn scale times `global_scale` [1].

    With `search` each block gets the scale of least square error, weighted by `importance` [K] (such as the
    mean square of each input) if given; else the one that fits its largest number.
    """
    scheme = Fp4Scheme("nvfp4")
    blocks = weight.reshape(len(weight), -1, scheme.group_size)
    factor = global_scale.to(weight)
    fitting = blocks.abs().amax(-1) / FP4_MAX / factor
    candidates = (_e4m3(fitting * ratio) for ratio in (_RATIOS if search else (1.0,)))
    scale = _best(blocks, candidates, factor, importance)
    codes = fp4_codes((blocks / (scale.float() * factor)[..., None]).flatten(1))
    return Fp4Tensor(codes, scale, global_scale, scheme)


def quantize_mxfp4(weight: Tensor, *, importance: Tensor | None = None) -> Fp4Tensor:
    """Round a weight [N, K] in blocks of 32 inputs, each with the better of two powers of two.

    With the one the block's largest number lies between 4 and 8 and is clipped to 6; with the other, between
    2 and 4. Errors are weighted by `importance` [K], if given.
    """
    scheme = Fp4Scheme("mxfp4")
    blocks = weight.reshape(len(weight), -1, scheme.group_size)
    largest = blocks.abs().amax(-1)
    exponent = torch.where(largest == 0, 0.0, torch.floor(torch.log2(largest)) - 2)
    candidates = (_e8m0(exponent + step) for step in (0, 1))
    scale = _best(blocks, candidates, torch.ones(1, device=weight.device).to(weight), importance)
    return Fp4Tensor(fp4_codes((blocks / scale.float()[..., None]).flatten(1)), scale, None, scheme)


def _best(blocks: Tensor, candidates: Iterable[Tensor], factor: Tensor, importance: Tensor | None) -> Tensor:
    """Of several scales for each of the blocks [N, G, g] the one of least square error."""
    weights = 1.0 if importance is None else importance.view(blocks.shape[1:])
    scale, least = None, None
    for candidate in candidates:
        wide = (candidate.float() * factor)[..., None]
        error = ((fp4_values(fp4_codes(blocks / wide)) * wide - blocks) ** 2 * weights).sum(-1)
        if scale is None or least is None:
            scale, least = candidate, error
            continue
        better = error < least
        least = torch.where(better, error, least)
        scale = torch.where(better, candidate.view(torch.uint8), scale.view(torch.uint8)).view(scale.dtype)
    assert scale is not None
    return scale


def _largest(weights: Sequence[Tensor]) -> Tensor:
    return torch.stack([weight.abs().amax() for weight in weights]).amax()


def _e4m3(scale: Tensor) -> Tensor:
    """A block of zeros gets scale 1; no other one rounds to zero, or beyond the largest."""
    kept = torch.where(scale == 0, 1.0, scale.clamp(_LEAST_E4M3, FP8_MAX))
    return kept.to(torch.float8_e4m3fn)


def _e8m0(exponent: Tensor) -> Tensor:
    return (exponent + 127).clamp(0, 254).to(torch.uint8).view(torch.float8_e8m0fnu)
