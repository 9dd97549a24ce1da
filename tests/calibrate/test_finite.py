import math

import pytest
import torch

from qtool.calibrate.finite import is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("place", [0, 17, 34])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_single_number_that_is_not_finite_is_found(dtype: torch.dtype, place: int, bad: float) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0] = torch.finfo(dtype).max
    assert is_finite(x)
    x.view(-1)[place] = bad
    assert not is_finite(x)


def test_nothing_at_all_is_finite() -> None:
    assert is_finite(torch.empty(0, 4))
