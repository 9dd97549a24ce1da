import pytest
import torch

from qtool.calibrate.kv import KvRanges, KvRounding
from qtool.core.schemes import KvCacheScheme


def passed(ranges: KvRanges) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    keys, values = torch.randn(1, 3, 50, 8), torch.randn(1, 3, 50, 8)
    keys[:, 1] *= 20
    for part in (slice(20), slice(20, 50)):
        assert ranges.update(keys[:, :, part], values[:, :, part], 0, kwargs={})[0] is not None
    return keys, values


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("per_head", [False, True], ids=["tensor", "head"])
def test_everything_seen_fits_and_comes_back_within_half_a_step(kind: str, per_head: bool) -> None:
    scheme = KvCacheScheme("int8" if kind == "int8" else "fp8", per_head)
    ranges = KvRanges()
    assert not ranges.seen
    keys, values = passed(ranges)
    scales = ranges.scales(scheme)
    assert scales.key.shape == ((3,) if per_head else (1,))
    rounded = KvRounding(scheme, scales).update(keys, values, 0)
    for x, back, scale in zip((keys, values), rounded, (scales.key, scales.value), strict=True):
        step = scale.view(-1, 1, 1) if kind == "int8" else x.abs() * 2.0**-3 + scale.view(-1, 1, 1) * 2.0**-9
        assert bool(((back - x).abs() <= step * 0.501).all())


def test_quiet_heads_keep_their_digits_when_each_has_a_scale() -> None:
    ranges = KvRanges()
    keys, values = passed(ranges)
    losses = []
    for per_head in (False, True):
        scheme = KvCacheScheme("int8", per_head)
        rounded, _ = KvRounding(scheme, ranges.scales(scheme)).update(keys, values)
        losses.append(float((rounded - keys)[:, 0].norm()))
    assert losses[1] < 0.1 * losses[0]


def test_keys_of_zero_get_scale_one() -> None:
    ranges = KvRanges()
    ranges.update(torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8))
    assert ranges.scales(KvCacheScheme("fp8")).key.tolist() == [1.0]
