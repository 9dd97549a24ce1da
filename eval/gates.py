"""Gates: limits on drift that a pipeline stops at."""

from dataclasses import dataclass

from qtool.core.recipe import Gates
from qtool.eval.drift import Drift


@dataclass(frozen=True)
class GateResult:
    """One limit held against one measurement."""

    name: str
    limit: float
    measured: float
    passed: bool

    def __str__(self) -> str:
        verdict = "passed" if self.passed else "FAILED"
        return f"{self.name} = {self.limit:g}: measured {self.measured:.6g}, {verdict}"


def check_gates(gates: Gates, drift: Drift) -> list[GateResult]:
    """Hold every limit that is set against the drift. A measurement that is not a number fails."""
    ceilings = [
        ("max_kl", gates.max_kl, drift.kl_mean),
        ("max_kl_p99", gates.max_kl_p99, drift.kl_p99),
        ("max_ppl_increase", gates.max_ppl_increase, drift.perplexity_increase),
    ]
    results = [
        GateResult(name, limit, measured, passed=measured <= limit)
        for name, limit, measured in ceilings
        if limit is not None
    ]
    if gates.min_top1 is not None:
        top1 = drift.top1_agreement
        results.append(GateResult("min_top1", gates.min_top1, top1, passed=top1 >= gates.min_top1))
    return results
