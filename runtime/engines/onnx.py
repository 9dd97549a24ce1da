"""The driver of ONNX engines: ONNX Runtime on the CPU over a pool in numpy. Imports no torch.

It runs exactly the graph that other targets build from, and is there for its numbers, not for its speed.
"""

from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from qtool.compile.engine import EngineSpec, read_spec
from qtool.errors import QtoolError
from qtool.runtime.engines.contract import Floats, Ints, Step, StepResult, wanted_hidden_rows
from qtool.runtime.engines.padded import PaddedBatch, by_length, pad
from qtool.runtime.engines.pool import num_blocks

MODEL = "model.onnx"
_MASK = "attention_mask"
_DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


class OnnxEngine:
    """Runs steps on an ONNX graph, a run for each number of new tokens that a step's sequences have."""

    def __init__(
        self,
        model: Path,
        spec: EngineSpec,
        *,
        kv_cache_tokens: int | None = None,
        threads: int | None = None,
    ) -> None:
        self.vocab_size = spec.vocab_size
        self.max_context = spec.max_context
        self.block_size = spec.block_size
        self.num_blocks = num_blocks(kv_cache_tokens, spec.block_size, spec.kv_bytes_per_token)
        self.hidden_states = spec.hidden_states
        self.takes_trees = True
        self._session = open_session(model, threads)
        inputs = {port.name: port.type for port in self._session.get_inputs()}
        self._windows = {_window(name): name for name in inputs if name.startswith(_MASK)}
        self._outputs = [
            "logits",
            *(["hidden_states"] if spec.hidden_states else []),
            *(f"new_{kind}.{i}" for i in range(spec.num_layers) for kind in ("key", "value")),
        ]
        shape = (spec.num_layers, 2, self.num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
        self._pool: NDArray[np.floating] = np.zeros(shape, _DTYPES[inputs["key_pool.0"]])
        self._pool_views = {
            f"{kind}_pool.{layer}": self._pool[layer, index].reshape(-1, spec.block_size, spec.head_dim)
            for layer in range(spec.num_layers)
            for index, kind in enumerate(("key", "value"))
        }

    def run(self, step: Step) -> Floats:
        """Run one step; logits [R, V] of the wanted rows."""
        return self.run_with_hidden(step).logits

    def run_with_hidden(self, step: Step) -> StepResult:
        """Run one step; logits and hidden states of the wanted rows."""
        logits = np.empty((len(step.logit_rows), self.vocab_size), np.float32)
        width = 0 if self.hidden_states is None else self.hidden_states.width
        hidden = np.empty((len(wanted_hidden_rows(step, self.hidden_states)), width), np.float32)
        for sequences in by_length(step):
            batch = pad(step, sequences, self.block_size, self._windows)
            feeds = {
                "token_ids": batch.token_ids,
                "positions": batch.positions,
                "block_tables": batch.block_tables,
                "logit_rows": batch.logit_rows,
                **{name: batch.masks[window] for window, name in self._windows.items()},
                **self._pool_views,
            }
            if self.hidden_states is not None:
                feeds["hidden_rows"] = batch.hidden_rows
            rows, *new = self._session.run(self._outputs, feeds)
            logits[batch.logit_places] = rows
            if self.hidden_states is not None:
                hidden[batch.hidden_places] = new.pop(0)
            self._commit(batch, new)
        return StepResult(logits, hidden)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's keys and values, every layer."""
        self._pool[:, :, target] = self._pool[:, :, source]

    def move_slots(self, sources: Ints, targets: Ints) -> None:
        """Copy keys and values from the slots `sources` to `targets`, every layer."""
        (source, at), (target, to) = (np.divmod(slots, self.block_size) for slots in (sources, targets))
        self._pool[:, :, target, :, to] = self._pool[:, :, source, :, at]

    def _commit(self, batch: PaddedBatch, new: list[NDArray[np.floating]]) -> None:
        """Write the new keys and values, each [B, Hkv, S, D], to the slots of their tokens."""
        blocks, offsets = np.divmod(batch.slots, self.block_size)
        rows, places = np.divmod(batch.token_rows, batch.token_ids.shape[1])
        for index, entries in enumerate(new):
            self._pool[index // 2, index % 2][blocks, :, offsets] = entries[rows, :, places]


def open_session(model: Path, threads: int | None) -> ort.InferenceSession:
    """Open a graph in ONNX Runtime with nothing rounded on its own: 4-bit products sum in float32."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions share no base class of their own
        raise QtoolError(f"{model}: cannot be opened by ONNX Runtime {ort.__version__}: {error}") from error


def _window(name: str) -> int | None:
    """The sliding window that a mask input is for."""
    window = name.removeprefix(_MASK).removeprefix(".")
    return int(window) if window else None


def open_onnx(path: Path, kv_cache_tokens: int | None, threads: int | None) -> OnnxEngine:
    """Open an engine folder of target ``onnx``."""
    return OnnxEngine(path / MODEL, read_spec(path), kv_cache_tokens=kv_cache_tokens, threads=threads)
