"""The driver that compares quantizers, without any: what it runs, what it leaves out, how it counts."""

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


driver = _load("quantize_vs_peers", BENCHMARKS / "quantize_vs_peers.py")
CELL = driver.Cell("mlp", "int4-g64-asym", 128, 512)


def _result(kl: float) -> dict[str, Any]:
    return {
        "kl_mean": kl,
        "top1_agreement": 0.9,
        "perplexity": 25.0,
        "seconds": 10.0,
        "peak_memory_bytes": 2**30,
    }


def _run(contender: str, seed: int, kl: float) -> Any:
    return driver.Run(CELL, contender, seed, 2, "abc", _result(kl))


def test_ratios_pair_seeds_and_medians_are_over_all_of_them() -> None:
    runs = [_run("qtool:gptq", 0, 0.1), _run("qtool:gptq", 1, 0.2), _run("peer:gptq", 1, 0.3)]
    runs += [_run("peer:gptq", 2, 0.9), _run("peer:gptq", 3, 0.6)]
    ours, theirs = driver.table(runs, "qtool:gptq")
    assert (ours.contender, ours.ratio) == ("qtool:gptq", (1.0, 1.0, 1.0))
    assert theirs.seeds == [1, 2, 3]
    assert theirs.kl == (0.6, 0.3, 0.9)
    assert theirs.ratio == pytest.approx((1.5, 1.5, 1.5))  # of seed 1 alone, which both have


def test_a_contender_without_the_reference_has_no_ratio() -> None:
    (row,) = driver.table([_run("peer:gptq", 0, 0.3)], "qtool:gptq")
    assert row.ratio is None
    assert "| peer:gptq | 0 | 0.3000 |  |" in driver.render(CELL, [row], "qtool:gptq")


def test_a_table_names_its_seeds_and_leaves_seconds_out_on_demand() -> None:
    (row,) = driver.table([_run("qtool:gptq", seed, 0.1 * (seed + 1)) for seed in (0, 1)], "qtool:gptq")
    expected = "| qtool:gptq | 0, 1 | 0.1500 (0.1000 to 0.2000) | 1.00 (1.00 to 1.00) | 90.0% | 25.00 |"
    assert driver.render(CELL, [row], "qtool:gptq").splitlines()[-1] == f"{expected} 10 | 1.00 |"
    short = driver.render(CELL, [row], "qtool:gptq", seconds=False)
    assert short.splitlines()[-1] == f"{expected} 1.00 |"
    assert "seconds" not in short


def test_a_line_that_was_cut_short_is_left_out(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    assert driver.read_runs(results) == []
    line = json.dumps(driver.asdict(_run("qtool:gptq", 0, 0.1)))
    results.write_text(f"{line}\n{line[: len(line) // 2]}")
    assert driver.read_runs(results) == [_run("qtool:gptq", 0, 0.1)]


def test_only_what_is_missing_is_run_and_a_failure_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str, int]] = []

    def execute(python: str, library: str, job: dict[str, Any]) -> dict[str, Any] | None:
        assert job["scheme"] == CELL.scheme
        asked.append((python, f"{library}:{job['method']}", job["seed"]))
        return None if library == "broken" else _result(0.2)

    monkeypatch.setattr(driver, "execute", execute)
    monkeypatch.setattr(driver, "write_baseline", lambda *_: None)
    monkeypatch.setattr(driver, "write_windows", lambda *_: tmp_path / "windows.safetensors")
    monkeypatch.setattr(driver, "commit", lambda: "abc")
    contenders = ["broken:rtn", "qtool:awq+gptq"]
    args = argparse.Namespace(
        **driver.asdict(CELL),
        checkpoint=tmp_path,
        calibration_text="a.txt",
        evaluation_text="b.txt",
        contenders=contenders,
        seeds=[0, 1],
        threads=2,
        again=False,
        results=tmp_path / "results.jsonl",
    )
    pythons = {"qtool": "ours", "broken": "theirs"}
    assert not driver.measure(args, pythons)
    assert asked == [
        (python, contender, seed)
        for seed in (0, 1)
        for python, contender in zip(("theirs", "ours"), contenders, strict=True)
    ]
    asked.clear()
    assert not driver.measure(args, pythons)
    assert asked == [("theirs", "broken:rtn", 0), ("theirs", "broken:rtn", 1)]
    args.contenders = ["qtool:awq+gptq"]
    assert driver.measure(args, pythons)
    assert len(driver.read_runs(args.results)) == 2


@pytest.mark.parametrize(
    "scheme", ["int4-g64-asym", "int8-g128-sym", "w8a8", "w8a8-static", "fp8", "fp8-static"]
)
@pytest.mark.parametrize("scope", ["mlp", "linears"])
def test_every_scheme_is_a_recipe(scheme: str, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    ours = _load("quantize_qtool", BENCHMARKS / "peers" / "quantize_qtool.py")
    job = sys.modules["quantize_job"].Job("c", "rtn", scheme, scope, "t.txt", 16, 64, 3, 1, "w", "b")
    recipe = ours.recipe(job)
    assert recipe.calibration.seed == 3
    (rule,) = recipe.quantization.rules
    assert ("*.self_attn.*" in rule.targets) == (scope == "linears")
    assert (rule.activations is None) == scheme.startswith("int")
    assert rule.activations is None or rule.activations.dynamic != scheme.endswith("static")


def test_a_method_takes_its_options_after_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "peers"))
    ours = _load("quantize_qtool", BENCHMARKS / "peers" / "quantize_qtool.py")

    def method(name: str) -> Any:
        job = sys.modules["quantize_job"].Job(
            "c", name, "int4-g64-asym", "mlp", "t.txt", 16, 64, 3, 1, "w", "b"
        )
        (rule,) = ours.recipe(job).quantization.rules
        return rule.method

    assert not method("rtn").search_range
    assert method("rtn-mse").search_range
    assert method("awq+gptq-correct").name == "awq+gptq"
    assert method("awq+gptq-correct").correct
