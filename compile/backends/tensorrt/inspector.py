"""What the builder's inspector says about a plan: its text, taken apart.

With ProfilingVerbosity.DETAILED, a builder logs this text as one VERBOSE message that starts with "Layers:".
It is the only view of a plan where there is no GPU to open it with.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qtool.compile.backends.tensorrt.checks import GraphFacts
from qtool.compile.backends.tensorrt.info import Bounds, IoTensor, Layer, LayerTensor
from qtool.compile.backends.tensorrt.log import Line
from qtool.errors import QtoolError

_TENSOR = re.compile(
    r"\{ Name: (?P<name>.*?), Dimensions: \[(?P<dims>[-\d,]*)\],.*?Datatype: (?P<dtype>\w+),"
)
_LAYER = re.compile(
    r"Name: (?P<name>.*?), LayerType: (?P<kind>\w+), Inputs: \[(?P<inputs>.*?)\], "
    r"Constants: \[(?P<constants>.*?)\], Outputs: \[(?P<outputs>.*?)\], TacticName: .*?"
    r"Metadata: ?(?P<metadata>.*)"
)
_PROFILE = re.compile(r"_myl(\d+)(?:_\d+)?$|\[profile (\d+)\]")
_IO = re.compile(
    r"Name: (?P<name>.*?), IOMode: (?P<mode>\w+), DataType: (?P<dtype>\w+), "
    r"Dimensions: \[(?P<dims>[-\d,]*)\], .*?ProfileInfo: \[(?P<profiles>.*)\]$"
)
_BOUNDS = re.compile(r"MinShape: \[([\d,]*)\], OptShape: \[([\d,]*)\], MaxShape: \[([\d,]*)\]")
_SCALES = {"Half", "Float", "BFloat16"}


@dataclass(frozen=True)
class Inspection:
    """A plan as its builder described it."""

    layers: tuple[Layer, ...]
    tensors: tuple[IoTensor, ...]
    weight_bytes: int
    activation_bytes: tuple[int, ...]
    """Of each profile."""


def inspect(lines: Sequence[Line]) -> Inspection:
    """Read a build's log. Raises QtoolError where it lacks a part, or says it in other words."""
    text = next((line.text for line in lines if line.text.startswith("Layers:")), None)
    if text is None:
        raise QtoolError("the builder's log holds no inspector text; is this version's wording another one?")
    layers, _, rest = text.partition("I/O Tensors:")
    io = rest.partition("Engine Metadata:")[0]
    totals = [
        [
            int(number)
            for line in lines
            for number in re.findall(rf"^Total {what} Memory: (\d+) bytes", line.text)
        ]
        for what in ("Weights", "Activation")
    ]
    if len(totals[0]) != 1:
        raise QtoolError(
            f"the builder's log says {len(totals[0])} times how large the weights are; wanted once"
        )
    return Inspection(
        tuple(_layer(line) for line in layers.splitlines()[1:] if line.strip()),
        tuple(_io_tensor(line.strip()) for line in io.splitlines() if line.strip()),
        totals[0][0],
        tuple(totals[1]),
    )


def _layer(line: str) -> Layer:
    found = _LAYER.match(line)
    if found is None:
        raise QtoolError(f"the inspector describes a layer in unknown words: {line[:200]}")
    profile = _PROFILE.search(found["name"])
    return Layer(
        name=found["name"],
        kind=found["kind"],
        profile=int(profile[1] or profile[2]) if profile else 0,
        inputs=_tensors(found["inputs"]),
        constants=_tensors(found["constants"]),
        outputs=_tensors(found["outputs"]),
        nodes=tuple(re.findall(r"\[ONNX Layer: (.*?)\]", found["metadata"])),
    )


def _tensors(text: str) -> tuple[LayerTensor, ...]:
    return tuple(
        LayerTensor(dtype=found["dtype"], shape=_numbers(found["dims"])) for found in _TENSOR.finditer(text)
    )


def _io_tensor(line: str) -> IoTensor:
    found = _IO.match(line)
    if found is None:
        raise QtoolError(f"the inspector describes an input or output in unknown words: {line[:200]}")
    return IoTensor(
        name=found["name"],
        mode="input" if found["mode"] == "Input" else "output",
        dtype=found["dtype"],
        shape=_numbers(found["dims"]),
        profiles=tuple(
            Bounds(*map(_numbers, bounds.groups())) for bounds in _BOUNDS.finditer(found["profiles"])
        ),
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def check_holds(inspection: Inspection, facts: GraphFacts, num_profiles: int) -> None:
    """Raise QtoolError where a plan lacks weights, or scales, of the graph that it was built from.

    In each profile the 4-bit codes have to be all there, and each constant of codes in one layer with as many
    scales as it has blocks. When the builder applies one group's scales to all, they are elsewhere. Weights
    that are multiplied by codes have to be in a kernel that reads such, and that gives float32: in float16 a
    sum of codes would be infinite.
    """
    for profile in range(num_profiles):
        layers = [layer for layer in inspection.layers if layer.profile == profile]
        if not layers:
            raise QtoolError(f"the plan has no layers for profile {profile}")
        codes = sum(_check_scales(layer, facts) for layer in layers)
        if codes != facts.int4_codes:
            raise QtoolError(
                f"profile {profile} of the plan holds {codes} weights in 4 bits, the graph {facts.int4_codes}"
            )
        for dtype, count in facts.multiplied_codes.items():
            found = sum(_multiplied(layer, dtype) for layer in layers)
            if found != count:
                raise QtoolError(
                    f"profile {profile} of the plan multiplies {found} weights as {dtype} codes, the graph "
                    f"{count}: for the others this version of the builder fell back to 16 bits"
                )


def _check_scales(layer: Layer, facts: GraphFacts) -> int:
    """The number of 4-bit codes in a layer that also has their scales."""
    scales = {math.prod(constant.shape) for constant in layer.constants if constant.dtype in _SCALES}
    total = 0
    for constant in layer.constants:
        if constant.dtype != "Int4":
            continue
        codes = math.prod(constant.shape)
        if not any(codes == count * block for count in scales for block in facts.int4_blocks):
            raise QtoolError(
                f"layer {layer.name} of the plan holds {codes} weights in 4 bits without a scale for each "
                f"block of {_any(facts.int4_blocks)}: this version of the builder would compute wrong numbers"
            )
        total += codes
    return total


def _multiplied(layer: Layer, dtype: str) -> int:
    """The codes of a weight that a layer multiplies by codes of its own type."""
    if not any(tensor.dtype == dtype for tensor in layer.inputs):
        return 0
    codes = sum(
        math.prod(constant.shape)
        for constant in layer.constants
        if constant.dtype == dtype and len(constant.shape) > 1
    )
    if codes and any(output.dtype != "Float" for output in layer.outputs):
        raise QtoolError(
            f"layer {layer.name} of the plan sums products of {dtype} codes and gives the bare sums in "
            f"{layer.outputs[0].dtype}: they would overflow"
        )
    return codes


def count_unpacked(inspection: Inspection) -> int:
    """Kernels that write quantized weights out as numbers, for a product to read them back at every call."""
    return sum(
        any(_is_unpacked(constant, output) for constant in layer.constants for output in layer.outputs)
        for layer in inspection.layers
    )


def _is_unpacked(constant: LayerTensor, output: LayerTensor) -> bool:
    quantized = constant.dtype in ("Int4", "Int8", "FP8") and len(constant.shape) > 1
    return quantized and output.dtype in _SCALES and constant.shape == output.shape


def _any(numbers: Iterable[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))
