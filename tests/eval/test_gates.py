"""Gates pass at their limit, fail beyond it, and fail on what is not a number."""

import math
from dataclasses import replace

from qtool.core.recipe import Gates
from qtool.eval.drift import Drift
from qtool.eval.gates import check_gates

DRIFT = Drift(
    perplexity_base=20.0, perplexity=21.0, kl_mean=0.05, kl_p99=0.4, top1_agreement=0.9, positions=100
)


def test_no_limit_means_no_gate() -> None:
    assert check_gates(Gates(), DRIFT) == []


def test_a_gate_passes_at_its_limit_and_fails_beyond_it() -> None:
    at = Gates(max_kl=0.05, max_kl_p99=0.4, max_ppl_increase=0.051, min_top1=0.9)
    assert all(gate.passed for gate in check_gates(at, DRIFT))
    beyond = Gates(max_kl=0.0499, max_kl_p99=0.399, max_ppl_increase=0.049, min_top1=0.901)
    results = check_gates(beyond, DRIFT)
    assert [gate.name for gate in results] == ["max_kl", "max_kl_p99", "max_ppl_increase", "min_top1"]
    assert not any(gate.passed for gate in results)


def test_a_measurement_that_is_not_a_number_fails_its_gate() -> None:
    broken = replace(DRIFT, kl_mean=math.nan, top1_agreement=math.nan)
    assert not any(gate.passed for gate in check_gates(Gates(max_kl=1.0, min_top1=0.1), broken))


def test_a_failed_gate_names_limit_and_measurement() -> None:
    (gate,) = check_gates(Gates(max_kl=0.01), DRIFT)
    assert str(gate) == "max_kl = 0.01: measured 0.05, FAILED"
