"""The driver of OpenVINO engines on the CPU. Imports no torch: serving stays thin."""

from itertools import chain
from pathlib import Path

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from qtool.compile.engine import EngineSpec, read_spec
from qtool.core.recipe import OpenVinoOptions
from qtool.errors import QtoolError
from qtool.runtime.engines.contract import Floats, Ints, Step, StepResult, wanted_hidden_rows
from qtool.runtime.engines.pool import num_blocks

MODEL = "model.xml"
_NO_TREES = (
    "this OpenVINO engine takes chains of drafts, no trees: in a u8 KV cache the keys of a block share their "
    "scales, and sliding windows count slots, where a tree's positions differ"
)


class OpenVinoEngine:
    """Runs steps on a compiled ``openvino.Model`` over pools that stay in place."""

    def __init__(self, path: Path, *, kv_cache_tokens: int | None = None, threads: int | None = None) -> None:
        spec = read_spec(path)
        self.vocab_size = spec.vocab_size
        self.max_context = spec.max_context
        self.block_size = spec.block_size
        self.num_blocks = num_blocks(kv_cache_tokens, spec.block_size, spec.kv_bytes_per_token)
        self.hidden_states = spec.hidden_states
        self.takes_trees = spec.takes_trees
        compiled = compile_model(path / MODEL, spec, threads)
        self._request = compiled.create_infer_request()
        self._inputs = {port.any_name: index for index, port in enumerate(compiled.inputs)}
        self._views: dict[str, NDArray[np.generic]] = {}
        self._longest = ov.Tensor(ov.Type.i32, ov.Shape([]))
        self._request.set_input_tensor(self._inputs["max_context_len"], self._longest)
        self._pools = [self._allocate(port) for port in compiled.inputs if port.any_name.partition(".")[1]]

    def run(self, step: Step) -> Floats:
        """Run one step; logits [R, V] of the wanted rows. Raises ValueError for a table too short."""
        return self.run_with_hidden(step).logits

    def run_with_hidden(self, step: Step) -> StepResult:
        """Run one step; logits and hidden states of the wanted rows."""
        if step.masks is not None and not self.takes_trees:
            raise QtoolError(_NO_TREES)
        ends = step.past_lens + step.new_lens
        blocks = -(-ends // self.block_size)
        begins = _begins(blocks)
        used = chain.from_iterable(
            table[:count] for table, count in zip(step.block_tables, blocks.tolist(), strict=True)
        )
        self._set("token_ids", step.token_ids)
        self._set("positions", step.positions)
        self._set("past_lens", step.past_lens)
        self._set("subsequence_begins", _begins(step.new_lens))
        self._set("block_indices", np.fromiter(used, np.int32, begins[-1]))
        self._set("block_indices_begins", begins)
        self._set("logit_rows", step.logit_rows)
        hidden_rows = wanted_hidden_rows(step, self.hidden_states)
        if self.hidden_states is not None:
            self._set("hidden_rows", hidden_rows)
        self._set_masks(step)
        self._longest.data[()] = ends.max()
        self._request.infer(share_outputs=True)
        logits: Floats = self._request.get_output_tensor(0).data.copy()
        if self.hidden_states is None:
            return StepResult(logits, np.empty((0, 0), np.float32))
        hidden: Floats = self._request.get_output_tensor(1).data.copy()
        return StepResult(logits, hidden)

    def set_input(self, name: str, values: NDArray[np.generic]) -> None:
        """Set an input: in place where its shape stays, which takes a third of the time."""
        view = self._views.get(name)
        if view is not None and view.shape == values.shape:
            view[...] = values
            return
        tensor = ov.Tensor(values, shared_memory=False)
        self._request.set_input_tensor(self._inputs[name], tensor)
        self._views[name] = tensor.data

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's keys and values, every layer."""
        for pool in self._pools:
            pool[target] = pool[source]

    def move_slots(self, sources: Ints, targets: Ints) -> None:
        """Copy keys and values from the slots `sources` to `targets`, every layer."""
        if not self.takes_trees:
            raise QtoolError(_NO_TREES)
        (source, at), (target, to) = (np.divmod(slots, self.block_size) for slots in (sources, targets))
        for pool in self._pools:
            pool[target, :, to] = pool[source, :, at]

    def _set_masks(self, step: Step) -> None:
        """The masks among new tokens, row by row, one sequence after another; none for a causal step."""
        masks = [] if step.masks is None else [step.mask(i).ravel() for i in range(len(step.new_lens))]
        flat = np.concatenate(masks, dtype=np.uint8) if masks else np.empty(0, np.uint8)
        self.set_input("tree_masks", flat)
        self._set("tree_masks_begins", _begins(step.new_lens**2) if masks else np.empty(0, np.int32))

    def _set(self, name: str, values: Ints) -> None:
        self.set_input(name, np.ascontiguousarray(values, np.int32))

    def _allocate(self, port: ov.ConstOutput) -> NDArray[np.uint8]:
        """One layer's pool of keys or values, set as an input once; a view on its bytes [blocks, ...]."""
        shape = [self.num_blocks, *(dimension.get_length() for dimension in list(port.partial_shape)[1:])]
        tensor = ov.Tensor(port.element_type, ov.Shape(shape))
        self._request.set_input_tensor(self._inputs[port.any_name], tensor)
        return np.asarray(tensor.data).view(np.uint8)


def compile_model(file: Path, spec: EngineSpec, threads: int | None) -> ov.CompiledModel:
    """Compile an engine's graph for this CPU.

    Everything that OpenVINO would round on its own is off, unless the engine was compiled so. Threads are not
    pinned: beside any other work, a pinned thread waits for its core while another is idle.
    """
    options = spec.openvino or OpenVinoOptions()
    core = ov.Core()
    core.get_property(
        "CPU", "FULL_DEVICE_NAME"
    )  # loads the plugin, which brings PagedAttention to the reader
    try:
        model = core.read_model(file)
    except RuntimeError as error:
        raise QtoolError(f"{file}: cannot be read by OpenVINO {ov.__version__}: {error}") from error
    _mark(model, spec)
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": options.precision,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": options.dynamic_quantization or 0,
        "KV_CACHE_PRECISION": spec.kv_cache,
    }
    if threads is not None:
        settings["INFERENCE_NUM_THREADS"] = threads
    return core.compile_model(model, "CPU", settings)


def _mark(model: ov.Model, spec: EngineSpec) -> None:
    """Put back the marks on nodes that a saved model loses.

    The attention nodes need the shape of a key head. A marked conversion of a 16-bit constant keeps the
    constant at 16 bits; unmarked, the plugin expands it to float32, twice the bytes to read at every step.
    """
    for node in model.get_ops():
        kind = node.get_type_name()
        if kind == "PagedAttentionExtension":
            info = node.get_rt_info()
            info["num_k_heads"] = info["num_v_heads"] = spec.num_kv_heads
            info["k_head_size"] = info["v_head_size"] = spec.head_dim
        elif kind == "Convert" and node.input_value(0).get_element_type() in (ov.Type.f16, ov.Type.bf16):
            node.get_rt_info()["decompression_0"] = ""


def _begins(counts: Ints) -> Ints:
    """Where each run of `counts` begins, and the end of the last."""
    begins = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=begins[1:])
    return begins


def open_openvino(path: Path, kv_cache_tokens: int | None, threads: int | None) -> OpenVinoEngine:
    """Open an engine folder of target ``openvino``."""
    return OpenVinoEngine(path, kv_cache_tokens=kv_cache_tokens, threads=threads)
