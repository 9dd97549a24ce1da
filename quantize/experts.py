"""Experts that calibration hardly reached: what their linears are taken to see, and how they are rounded."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from qtool.calibrate.experts import expert_of
from qtool.calibrate.statistics import HeldOut, InputStatistics
from qtool.core.recipe import Rtn
from qtool.quantize.plan import Assignment

ENOUGH = 16
"""Tokens from which on methods may go by what an expert saw: as many as a group of NVFP4, the smallest there
is, has inputs. GPTQ shrinks what few tokens say of correlations by itself."""


def complete(
    statistics: Mapping[str, InputStatistics], in_features: Mapping[str, int]
) -> dict[str, InputStatistics]:
    """The statistics of all the linears of a layer that `in_features` gives K of, by full name.

    Linears of experts that no token chose are taken to see noise of power 1, in the range that the linears of
    the same name in other experts saw, with `tokens` 0. Any other linear without statistics stays without.
    """
    whole = dict(statistics)
    for module, size in in_features.items():
        if module not in whole and expert_of(module) is not None:
            alike = [seen for name, seen in statistics.items() if _role(name) == _role(module)]
            if alike:
                device = alike[0].low.device
                low, high = (
                    min(float(one.low.min()) for one in alike),
                    max(float(one.high.max()) for one in alike),
                )
                ends = torch.full((size,), low, device=device), torch.full((size,), high, device=device)
                moment, mean = torch.eye(size, device=device), torch.ones(size, device=device)
                none = HeldOut(torch.empty(0, size, device=device), *ends)
                whole[module] = InputStatistics(moment, mean, *ends, tokens=0, held_out=none)
    return whole


def _role(module: str) -> tuple[bool, str]:
    return expert_of(module) is not None, module.rpartition(".")[2]


def starved(
    assigned: Mapping[str, Assignment], statistics: Mapping[str, InputStatistics]
) -> dict[str, Assignment]:
    """Those linears of experts that saw too few tokens for their method, rounded to nearest instead."""
    return {
        module: replace(one, method=Rtn())
        for module, one in assigned.items()
        if expert_of(module) is not None
        and not isinstance(one.method, Rtn)
        and statistics[module].tokens < ENOUGH
    }
