"""What each target says that it executes is what the documentation says."""

from pathlib import Path

import pytest

from qtool.compile.abilities import WEIGHTS, Abilities
from qtool.compile.backends.tensorrt.schemes import least_capability
from qtool.compile.targets import TARGETS
from qtool.core.schemes import (
    ActivationScheme,
    Fp4Scheme,
    Fp8Scheme,
    IntScheme,
    LinearScheme,
    WeightScheme,
)
from tests.compile.linears import (
    ASYMMETRIC,
    BY_CODES,
    FP8,
    GROUPS,
    INT8,
    NVFP4,
    ROUNDED,
    STATIC_FP8,
    STATIC_INT8,
)
from tests.compile.linears import WEIGHTS as WEIGHT_SCHEMES

FORMATS = Path(__file__).parents[2] / "docs" / "formats.md"
INT4 = LinearScheme(IntScheme(4, 64, True))
ALONE = [LinearScheme(scheme) for scheme in WEIGHT_SCHEMES]
FP8_WEIGHTS = (Fp8Scheme(None, None), Fp8Scheme(1, None), Fp8Scheme(128, 128))


def under(weight: WeightScheme, *activations: ActivationScheme) -> list[LinearScheme]:
    return [LinearScheme(weight, activation) for activation in activations]


ROWS: list[tuple[str, list[LinearScheme]]] = [
    (
        "int2 to int8, groups or channels, with zero points or without",
        [scheme for scheme in ALONE if isinstance(scheme.weight, IntScheme)],
    ),
    (
        "fp8, one scale, channels, groups or blocks",
        [scheme for scheme in ALONE if isinstance(scheme.weight, Fp8Scheme)],
    ),
    ("nvfp4, mxfp4", [scheme for scheme in ALONE if isinstance(scheme.weight, Fp4Scheme)]),
    (
        "int5 to int8, channels; int8 inputs, static or per token",
        under(IntScheme(5, None, False), STATIC_INT8, INT8, ASYMMETRIC),
    ),
    (
        "int5 to int8, groups; int8 inputs, static, per token or per group of a token",
        under(IntScheme(8, 64, True), STATIC_INT8, ASYMMETRIC, GROUPS["int8"]),
    ),
    ("int5 to int8, groups with zero points; int8 inputs", under(IntScheme(8, 64, False), INT8)),
    ("int2 to int4; int8 inputs", under(INT4.weight, INT8) + under(IntScheme(2, None, True), STATIC_INT8)),
    (
        "fp8; fp8 inputs, static, per token or per group of a token",
        [scheme for weight in FP8_WEIGHTS for scheme in under(weight, STATIC_FP8, FP8, GROUPS["fp8"])],
    ),
    ("nvfp4; nvfp4 inputs", [NVFP4]),
    ("any other pair", under(Fp8Scheme(1, None), INT8) + under(Fp4Scheme("mxfp4"), FP8)),
]


def cell(target: str, schemes: list[LinearScheme]) -> str:
    """Whether the target executes the schemes, all or none of them, and on which GPUs."""
    (refused,) = {TARGETS[target].abilities.refusal(scheme) is not None for scheme in schemes}
    if refused or target != "tensorrt":
        return "no" if refused else "yes"
    (least,) = {least_capability(scheme) for scheme in schemes}
    return f"from {least / 10}" if least else "yes"


def test_the_table_of_the_documentation_is_what_targets_execute() -> None:
    targets = ("reference", "openvino", "onnx", "tensorrt")
    assert TARGETS["tensorrt"].abilities == TARGETS["tensorrt-rtx"].abilities
    lines = ["| weights; inputs | `reference` | `openvino` | `onnx` | `tensorrt`, `tensorrt-rtx` |"]
    lines += ["| --- " * 5 + "|"]
    lines += [f"| {label} | {' | '.join(cell(t, schemes) for t in targets)} |" for label, schemes in ROWS]
    assert "\n".join(lines) in FORMATS.read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", [*BY_CODES, NVFP4, *map(LinearScheme, WEIGHT_SCHEMES)], ids=str)
def test_what_is_tested_against_the_reference_is_what_is_taken(scheme: LinearScheme) -> None:
    assert all(target.abilities.refusal(scheme) is None for target in TARGETS.values())


@pytest.mark.parametrize("scheme", ROUNDED, ids=str)
def test_rounded_inputs_without_a_kernel_are_refused_where_kernels_are_the_point(
    scheme: LinearScheme,
) -> None:
    said = str(TARGETS["tensorrt-rtx"].abilities.refusal(scheme))
    assert "it multiplies rounded inputs by weights of their own kind alone" in said
    assert TARGETS["onnx"].abilities.refusal(scheme) is None


def test_a_target_names_the_weights_that_it_takes() -> None:
    few = Abilities(weights=tuple(name for name in WEIGHTS if name in ("int4", "fp8")))
    assert few.refusal(LinearScheme(Fp4Scheme("nvfp4"))) == "it takes weights in int4, fp8"
    assert few.refusal(INT4) is None
