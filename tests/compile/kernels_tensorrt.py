"""Drive the plugins as TensorRT's builder would, through NVIDIA's own Python layer, and say what it was told.

Run as a script: cases come as JSON through stdin, what TensorRT would launch leaves as JSON through stdout.

The wheel of the bindings is on PyPI, the libraries under it are not. Empty ones of the same names let it be
imported, and so `tensorrt.plugin`, the Python that checks the plugins' signatures and calls their functions,
is the real one. The builder's symbolic integers, which only the libraries make, are stood in for by numbers.
"""

import ctypes
import json
import operator
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

LIBRARIES = ("nvinfer", "nvinfer_plugin", "nvonnxparser")
SYMBOLS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)


class Registry:
    """Finds creators as TensorRT does, whose parser looks for an operator, version 1 and a namespace."""

    def __init__(self) -> None:
        self._creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str) -> None:
        self._creators[creator.name, creator.plugin_version, namespace] = creator

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self._creators[name, version, namespace]


REGISTRY = Registry()


def import_tensorrt() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.write_text("".join(f"void *{symbol}(void) {{ return 0; }}\n" for symbol in SYMBOLS))
        for library in LIBRARIES:
            target = Path(folder, f"lib{library}.so.11")
            name = f"-Wl,-soname,{target.name}"
            subprocess.run(["cc", "-shared", "-fPIC", name, source, "-o", target], check=True)
            ctypes.CDLL(str(target), ctypes.RTLD_GLOBAL)
        import tensorrt_bindings as trt
    # These two take nothing but the libraries' own expressions.
    trt.ISymExpr = object
    trt.DimsExprs = lambda length: [None] * length
    trt.get_plugin_registry = lambda: REGISTRY
    # What the package `tensorrt`, which asks for the libraries, does.
    sys.modules["tensorrt"] = trt
    import tensorrt_bindings.plugin as trtp

    sys.modules["tensorrt.plugin"] = trt.plugin = trtp
    return trt


trt = import_tensorrt()

from qtool.compile.kernels import tensorrt_plugin  # noqa: E402

OPERATIONS = {
    trt.DimensionOperation.SUM: operator.add,
    trt.DimensionOperation.SUB: operator.sub,
    trt.DimensionOperation.PROD: operator.mul,
    trt.DimensionOperation.MAX: max,
    trt.DimensionOperation.MIN: min,
    trt.DimensionOperation.FLOOR_DIV: operator.floordiv,
}


class Dimension:
    """A number in place of the builder's expression; it passes for one where the plugin layer asks."""

    def __init__(self, value: int):
        self.value = value

    @property
    def __class__(self) -> Any:
        return trt.IDimensionExpr


class Builder:
    """Computes what the real one would write down."""

    def constant(self, value: int) -> Dimension:
        return Dimension(value)

    def operation(self, operation: Any, left: Dimension, right: Dimension) -> Dimension:
        return Dimension(OPERATIONS[operation](left.value, right.value))


class Scalars(dict[int, Any]):
    nbSymExprs = 0  # noqa: N815


def tensor(shape: list[int], dtype: str) -> Any:
    described = trt.DynamicPluginTensorDesc()
    described.desc.type = getattr(trt.DataType, dtype)
    described.desc.format = trt.TensorFormat.LINEAR
    described.desc.dims = tuple(shape)
    return described


def field(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return SimpleNamespace(name=name, data=np.frombuffer(value.encode(), np.int8))
    return SimpleNamespace(name=name, data=np.array([value]))


def drive(name: str, inputs: list[tuple[list[int], str]], attributes: dict[str, Any], tactic: int) -> Any:
    """What the builder asks of one plugin, in its order; what it would then launch."""
    creator = REGISTRY.get_creator(name, "1", "qtool")
    plugin = creator.create_plugin(
        name,
        "qtool",
        [field(key, value) for key, value in attributes.items()],
        trt.TensorRTPhase.BUILD,
        trt.QuickPluginCreationRequest.STRICT_AOT,
    )
    given = [tensor(shape, dtype) for shape, dtype in inputs]
    dtypes = plugin.get_output_data_types(
        [each.desc.type for each in given], [len(shape) for shape, _ in inputs]
    )
    symbols = [[Dimension(size) for size in shape] for shape, _ in inputs]
    shapes = [[size.value for size in shape] for shape in plugin.get_output_shapes(symbols, [], Builder())]
    made = [tensor(shape, dtype.name) for shape, dtype in zip(shapes, dtypes, strict=True)]
    plugin.get_supported_format_combinations(given + made, len(given))
    plugin.configure_plugin(given, made)
    tactics = plugin.get_valid_tactics()
    plugin.set_tactic(tactic)
    launch, scalars = SimpleNamespace(), Scalars()
    plugin.get_launch_params(symbols, given + made, len(given), launch, scalars, Builder())
    kernel, ptx = plugin.get_kernel([each.desc for each in given], [each.desc for each in made])
    numbers = {key: expression.expr.value for key, expression in vars(launch).items()}
    return {
        "fields": {each.name: each.type.name for each in creator.field_names},
        "outputs": [[shape, dtype.name] for shape, dtype in zip(shapes, dtypes, strict=True)],
        "tactics": sorted(tactics),
        "grid": [numbers["grid_x"], numbers["grid_y"], numbers["grid_z"]],
        "block": [numbers["block_x"], numbers["block_y"], numbers["block_z"]],
        "shared": numbers["shared_mem"],
        "scalars": [scalars[place].expr.value for place in range(scalars.nbSymExprs)],
        "kernel": kernel,
        "parameters": re.findall(r"\.param \.(\w+)", ptx.decode()),
    }


if __name__ == "__main__":
    cases = json.load(sys.stdin)
    tensorrt_plugin.register()
    json.dump([drive(**case) for case in cases], sys.stdout)
