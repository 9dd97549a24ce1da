"""An ONNX graph under construction, its large weights streamed to a file beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

OPSET = 23
"""The first with Attention, RMSNormalization and RotaryEmbedding."""
_IR_VERSION = 11
_INLINE = 1024
"""Bytes up to which a tensor stays in the graph: shapes must be there to be inferred."""
_ALIGNMENT = 4096
"""Of a tensor in the file, so that a reader can map it."""

Attribute = int | float | str | Sequence[int]
Dimension = int | str
"""A number, or the name of a size that each run chooses."""


@dataclass(frozen=True)
class Tensor:
    """Stored numbers: row-major bytes of an ONNX element type; 4-bit ones two a byte, low nibble first."""

    raw: NDArray[np.uint8]
    kind: int
    shape: Sequence[int]


class Graph:
    """Nodes in the order of use. Every method that adds something returns the name of its tensor."""

    def __init__(self, data: BinaryIO, location: str) -> None:
        self._data, self._location = data, location
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: dict[str, onnx.ValueInfoProto] = {}
        self._outputs: list[onnx.ValueInfoProto] = []
        self._declared: list[onnx.ValueInfoProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._constants: dict[tuple[bytes, int, tuple[int, ...]], str] = {}

    def input(self, name: str, kind: int, shape: Sequence[Dimension]) -> str:
        """An input, the same one however often it is asked for."""
        self._inputs[name] = helper.make_tensor_value_info(name, kind, shape)
        return name

    def output(self, name: str, value: str, kind: int, shape: Sequence[Dimension]) -> None:
        """Give out `value` under the name `name`."""
        self._nodes.append(helper.make_node("Identity", [value], [name], name=name))
        self._outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def declare(self, value: str, kind: int, shape: Sequence[Dimension]) -> None:
        """Say what a tensor is that cannot be inferred, being made by an operator that ONNX does not know."""
        self._declared.append(helper.make_tensor_value_info(value, kind, shape))

    def node(self, operator: str, *inputs: str, **attributes: Attribute) -> str:
        """An operator with one output."""
        return self.nodes(operator, inputs, 1, **attributes)[0]

    def nodes(self, operator: str, inputs: Sequence[str], count: int, **attributes: Attribute) -> list[str]:
        """An operator with `count` outputs; one that is not ONNX's own is named ``domain::operator``."""
        domain, _, operator = operator.rpartition("::")
        name = f"{operator}_{len(self._nodes)}"
        outputs = [f"{name}.{index}" for index in range(count)]
        node = helper.make_node(operator, inputs, outputs, name=name, domain=domain)
        node.attribute.extend(helper.make_attribute(*pair) for pair in attributes.items())
        self._nodes.append(node)
        return outputs

    def integers(self, *values: int) -> str:
        """A constant vector of int64."""
        return self.constant(np.array(values, np.int64))

    def constant(self, values: NDArray[np.generic]) -> str:
        """A small constant in the type of `values`; equal ones are one."""
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        key = (values.tobytes(), kind, values.shape)
        if key not in self._constants:
            raw = np.frombuffer(key[0], np.uint8)
            self._constants[key] = self.weight("constant", Tensor(raw, kind, values.shape))
        return self._constants[key]

    def weight(self, name: str, tensor: Tensor) -> str:
        """A stored tensor, its `name` made unique; a large one goes to the file."""
        name = f"{name}_{len(self._weights)}"
        proto = TensorProto(name=name, data_type=tensor.kind, dims=tensor.shape)
        if tensor.raw.nbytes <= _INLINE:
            proto.raw_data = tensor.raw.tobytes()
        else:
            self._data.write(bytes(-self._data.tell() % _ALIGNMENT))
            place = {"location": self._location, "offset": self._data.tell(), "length": tensor.raw.nbytes}
            self._data.write(np.ascontiguousarray(tensor.raw).data)
            proto.data_location = TensorProto.EXTERNAL
            for key, value in place.items():
                proto.external_data.add(key=key, value=str(value))
        self._weights.append(proto)
        return name

    def model(self, name: str) -> onnx.ModelProto:
        """The graph as a model, whose weights are in the file."""
        graph = helper.make_graph(
            self._nodes,
            name,
            list(self._inputs.values()),
            self._outputs,
            initializer=self._weights,
            value_info=self._declared,
        )
        others = sorted({node.domain for node in self._nodes} - {""})
        return helper.make_model(
            graph,
            opset_imports=[
                helper.make_opsetid("", OPSET),
                *(helper.make_opsetid(domain, 1) for domain in others),
            ],
            ir_version=_IR_VERSION,
            producer_name="qtool",
        )
