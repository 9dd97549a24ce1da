"""EAGLE's network as an OpenVINO graph: the decoder's lowering with a feature beside each token."""

from dataclasses import replace
from pathlib import Path

import openvino as ov
from openvino import opset13 as ops
from openvino.op import Parameter
from torch import Tensor, float32

from qtool.compile.backends.openvino import Node, OpenVino, save
from qtool.compile.heads.eagle import draft
from qtool.compile.heads.head import Head
from qtool.core.qtensor import Linear
from qtool.core.schemes import IntScheme
from qtool.quantize.methods.grid import fit_grid

_GROUP = 32
"""Inputs that share a scale, where a row is whole groups. One scale a row costs a tenth of the second and
third drafts, since features have outliers."""


class DraftOpenVino(OpenVino):
    """The backend's operations, and features beside the tokens."""

    def features(self, width: int) -> Node:
        parameter = Parameter(ov.Type.f32, ov.PartialShape([-1, width]))
        parameter.set_friendly_name("features")
        parameter.output(0).get_tensor().set_names({"features"})
        self.parameters["features"] = parameter
        return parameter.output(0)

    def join(self, a: Node, b: Node) -> Node:
        return ops.concat([a, b], 1).output(0)


class _Rounded:
    """A head's weights, its linears in 8 bits: they hardly make a wrong draft, which costs only time."""

    def __init__(self, head: Head) -> None:
        self._head = head

    def tensor(self, name: str) -> Tensor:
        return self._head.tensor(name)

    def has(self, name: str) -> bool:
        return self._head.has(name)

    def linear(self, module: str) -> Linear:
        linear = self._head.linear(module)
        dense = linear.dense()
        scheme = IntScheme(8, None if dense.shape[1] % _GROUP else _GROUP, symmetric=True)
        return replace(linear, weight=fit_grid(dense, scheme, float32).quantize(dense))


def build_draft_model(head: Head) -> ov.Model:
    """Inputs as a decoder's and ``features`` [T, hidden]; logits over the head's tokens, then features."""
    backend = DraftOpenVino()
    decoded = draft(head.config, _Rounded(head), backend)
    outputs = {"logits": decoded.logits, "hidden_states": decoded.hidden[0]}
    for name, output in outputs.items():
        output.get_tensor().set_names({name})
    return ov.Model(list(outputs.values()), list(backend.parameters.values()), head.config.kind)


def write_draft(head: Head, folder: Path) -> None:
    """Write the graph and its weights as ``model.xml`` and ``model.bin``."""
    save(build_draft_model(head), folder)
