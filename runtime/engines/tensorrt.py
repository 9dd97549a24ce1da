"""The driver of TensorRT engines: contexts, device buffers and the KV pool around calls of a plan.

What it asks of TensorRT is `Context` and what it asks of a GPU is `Device`. Objects of both exist without a
GPU too, in the tests: they run the graph that the plan was built from and hold every call to the contract in
``engine_info.json``. What has to be right on a GPU beyond that is in `tensorrt_cuda`.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.compile.backends.tensorrt.info import EngineInfo, IoTensor, read_info
from qtool.compile.engine import EngineSpec, read_spec
from qtool.errors import QtoolError, UsageError
from qtool.runtime.engines.contract import Floats, Ints, Step, StepResult, wanted_hidden_rows
from qtool.runtime.engines.padded import PaddedBatch, pad
from qtool.runtime.engines.tensorrt_calls import Call, grow, plan_calls, round_up, step_of

_DTYPES = {"Int32": torch.int32, "Bool": torch.bool, "Half": torch.float16, "Float": torch.float32}
_MASK = "attention_mask"
ALIGNMENT = 256
"""Bytes that the address of every tensor has to be a multiple of."""


class Context(Protocol):
    """What is used of TensorRT's IExecutionContext, under its own names. False means refused."""

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool: ...

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...

    def set_tensor_address(self, name: str, memory: int) -> bool: ...

    def execute_async_v3(self, stream_handle: int) -> bool: ...


class Device(Protocol):
    """What is used of a GPU beyond torch's tensors."""

    torch_device: torch.device
    stream: int
    """The handle of the stream that everything is queued on."""

    def active(self) -> AbstractContextManager[None]:
        """Within, torch queues its work on the stream too. It holds for one thread alone."""
        ...

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What queues `work` again at less cost to the host. It has run before, and is not run now."""
        ...


@dataclass
class _Profile:
    """One profile's context with buffers as large as its largest call."""

    context: Context
    inputs: dict[str, torch.Tensor]
    """Flat."""
    host: dict[str, torch.Tensor]
    """The same on the host, page-locked where there is a GPU, so that copies need not wait."""
    logits: torch.Tensor
    hidden: torch.Tensor
    """Flat, empty where the engine gives no hidden states."""
    entries: torch.Tensor
    """[2 · layers, features of the largest call]: new keys and values of each layer, key before value."""
    shapes: dict[str, tuple[int, ...]]
    """That the context has."""
    graphs: dict[tuple[int, int, int], Callable[[], None]]
    """Calls that were captured, by B, S and M."""


class TensorRtEngine:
    """Runs steps as calls of a plan. The pool and all buffers stay in place: addresses are set once."""

    def __init__(
        self,
        spec: EngineSpec,
        info: EngineInfo,
        new_context: Callable[[], Context],
        device: Device,
        *,
        kv_cache_tokens: int,
        capture: bool,
    ) -> None:
        """`capture` makes CUDA graphs of decode and verify calls; False where the library does so itself.

        Raises UsageError for a pool that the plan cannot address.
        """
        layout = info.pool
        self.vocab_size = spec.vocab_size
        self.max_context = info.max_context
        self.block_size = layout.block_size
        self.hidden_states = spec.hidden_states
        self.takes_trees = True
        self.num_blocks = -(-kv_cache_tokens // layout.block_size)
        if self.num_blocks > layout.max_blocks:
            raise UsageError(
                f"kv_cache_tokens {kv_cache_tokens} makes {self.num_blocks} blocks, the engine was built for "
                f"{layout.max_blocks} at most; ask for fewer, or compile with a larger max_num_seqs"
            )
        self._width = 0 if spec.hidden_states is None else spec.hidden_states.width
        self._info, self._device, self._capture = info, device, capture
        shape = (
            2 * layout.num_layers,
            self.num_blocks,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        self._pool = _buffer(math.prod(shape), _DTYPES[layout.dtype], device.torch_device).view(shape)
        self._windows = {
            _window(tensor.name): tensor.name for tensor in info.tensors if tensor.name.startswith(_MASK)
        }
        self._new_context = new_context  # keeps the plan open
        with device.active():
            self._pool.zero_()
            self._profiles = [self._open(index, new_context()) for index in range(len(info.profiles))]

    def run(self, step: Step) -> Floats:
        """Run one step; logits [R, V] of the wanted rows. Raises QtoolError beyond the engine's limits."""
        return self.run_with_hidden(step).logits

    @torch.inference_mode()
    def run_with_hidden(self, step: Step) -> StepResult:
        """Run one step; logits and hidden states of the wanted rows."""
        logits = np.empty((len(step.logit_rows), self.vocab_size), np.float32)
        hidden = np.empty((len(wanted_hidden_rows(step, self.hidden_states)), self._width), np.float32)
        for call in plan_calls(step, self._info):
            part, logit_places, hidden_places = step_of(step, call.pieces)
            batch = pad(part, range(len(call.pieces)), self.block_size, self._windows)
            with self._device.active():
                result = self._run(call, batch)
            logits[logit_places[batch.logit_places]] = result.logits
            hidden[hidden_places[batch.hidden_places]] = result.hidden
        return StepResult(logits, hidden)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block's keys and values, every layer."""
        with self._device.active():
            self._pool[:, target] = self._pool[:, source]

    def move_slots(self, sources: Ints, targets: Ints) -> None:
        """Copy keys and values from the slots `sources` to `targets`, every layer."""
        places = np.stack([*np.divmod(sources, self.block_size), *np.divmod(targets, self.block_size)])
        with self._device.active():
            block, offset, to_block, to_offset = self._to_device(places)
            self._pool[:, to_block, :, to_offset] = self._pool[:, block, :, offset]

    def _run(self, call: Call, batch: PaddedBatch) -> StepResult:
        """Run one call and commit its keys and values; what it gives of its wanted rows."""
        profile, info = self._profiles[call.profile], self._info.profiles[call.profile]
        wanted = {"logit_rows": batch.logit_rows}
        if self.hidden_states is not None:
            wanted["hidden_rows"] = batch.hidden_rows
        if info.kind != "prefill":
            batch = grow(
                batch,
                round_up(len(batch.token_ids), info.sizes["B"][2]),
                round_up(batch.block_tables.shape[1], info.sizes["M"][2]),
                self.block_size,
            )
        self._fill(profile, "token_ids", batch.token_ids)
        self._fill(profile, "positions", batch.positions)
        self._fill(profile, "block_tables", batch.block_tables)
        places = {}
        for name, rows in wanted.items():
            asked, places[name] = _rows_to_ask(rows, batch, whole=info.kind != "prefill")
            self._fill(profile, name, asked)
        for window, name in self._windows.items():
            self._fill(profile, name, batch.masks[window])
        self._execute(call.profile, batch)
        self._commit(profile, batch)
        logits = self._rows(profile.logits, self.vocab_size, places["logit_rows"])
        if self.hidden_states is None:
            return StepResult(logits, np.empty((0, 0), np.float32))
        return StepResult(logits, self._rows(profile.hidden, self._width, places["hidden_rows"]))

    def _rows(self, flat: torch.Tensor, width: int, places: Ints) -> Floats:
        """Rows of `width` numbers of an output."""
        every = flat[: len(flat) // width * width].view(-1, width)
        rows: Floats = every[self._to_device(places)].cpu().numpy()
        return rows

    def _fill(self, profile: _Profile, name: str, values: NDArray[np.generic]) -> None:
        """Copy an input to its buffer and tell the context its shape."""
        host = profile.host[name][: values.size]
        host.numpy()[:] = values.reshape(-1)
        profile.inputs[name][: values.size].copy_(host, non_blocking=True)
        if profile.shapes.get(name) != values.shape:
            if not profile.context.set_input_shape(name, values.shape):
                raise QtoolError(f"the engine refused shape {values.shape} for {name}")
            profile.shapes[name] = values.shape

    def _execute(self, index: int, batch: PaddedBatch) -> None:
        profile = self._profiles[index]
        if not self._capture or self._info.profiles[index].kind == "prefill":
            self._queue(profile)
            return
        sequences, tokens = batch.token_ids.shape
        key = sequences, tokens, batch.block_tables.shape[1]
        if key in profile.graphs:
            profile.graphs[key]()
        else:
            self._queue(profile)  # the first run of a shape loads kernels, which a capture must not
            profile.graphs[key] = self._device.capture(lambda: self._queue(profile))

    def _queue(self, profile: _Profile) -> None:
        if not profile.context.execute_async_v3(self._device.stream):
            raise QtoolError("the engine refused to run a call; its own log on stderr says why")

    def _commit(self, profile: _Profile, batch: PaddedBatch) -> None:
        """Write the call's keys and values to the slots of its tokens: one indexed write for all layers."""
        layout = self._info.pool
        sequences, tokens = batch.token_ids.shape
        shape = (sequences, layout.num_kv_heads, tokens, layout.head_dim)
        new = profile.entries[:, : math.prod(shape)].view(-1, *shape)
        places = [*np.divmod(batch.slots, self.block_size), *np.divmod(batch.token_rows, tokens)]
        block, offset, row, token = self._to_device(np.stack(places))
        self._pool[:, block, :, offset] = new[:, row, :, token]

    def _to_device(self, values: NDArray[np.integer]) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self._device.torch_device)

    def _open(self, index: int, context: Context) -> _Profile:
        """Choose the profile and give every tensor its address."""
        if not context.set_optimization_profile_async(index, self._device.stream):
            raise QtoolError(f"the engine refused its profile {index}")
        device, page_locked = self._device.torch_device, self._device.torch_device.type == "cuda"
        high = {name: size[2] for name, size in self._info.profiles[index].sizes.items()}
        layout = self._info.pool
        stride = high["B"] * high["S"] * layout.num_kv_heads * layout.head_dim
        stride += -stride % ALIGNMENT  # in elements, hence in bytes too
        profile = _Profile(
            context,
            inputs={},
            host={},
            logits=_buffer(high["R"] * self.vocab_size, torch.float32, device),
            hidden=_buffer(high["F"] * self._width if self._width else 0, torch.float32, device),
            entries=_buffer(2 * layout.num_layers * stride, _DTYPES[layout.dtype], device).view(-1, stride),
            shapes={},
            graphs={},
        )
        pool_rows = (self.num_blocks * layout.num_kv_heads, layout.block_size, layout.head_dim)
        for tensor in self._info.tensors:
            if "_pool." in tensor.name:
                address = self._pool[_entry(tensor.name)].data_ptr()
                if not context.set_input_shape(tensor.name, pool_rows):
                    raise QtoolError(f"the engine refused a pool of {self.num_blocks} blocks")
            elif tensor.mode == "input":
                count = math.prod(tensor.profiles[index].high)
                dtype = _DTYPES[tensor.dtype]
                profile.inputs[tensor.name] = _buffer(count, dtype, device)
                profile.host[tensor.name] = torch.empty(count, dtype=dtype, pin_memory=page_locked)
                address = profile.inputs[tensor.name].data_ptr()
            else:
                address = _output(profile, tensor).data_ptr()
            if not context.set_tensor_address(tensor.name, address):
                raise QtoolError(f"the engine refused an address for {tensor.name}")
        return profile


def _output(profile: _Profile, tensor: IoTensor) -> torch.Tensor:
    whole = {"logits": profile.logits, "hidden_states": profile.hidden}
    return whole[tensor.name] if tensor.name in whole else profile.entries[_entry(tensor.name)]


def _rows_to_ask(wanted: Ints, batch: PaddedBatch, *, whole: bool) -> tuple[Ints, Ints]:
    """The rows that a call asks an output for, and where those wanted lie among them.

    With `whole` all of the batch, so that calls of one shape are alike and can be captured; else those wanted
    or, since a plan has no dimension of 0, one.
    """
    if whole:
        return np.arange(batch.token_ids.size, dtype=np.int32), wanted
    return (wanted if len(wanted) else np.zeros(1, np.int32)), np.arange(len(wanted), dtype=np.int32)


def _entry(name: str) -> int:
    """Where ``key_pool.3`` or ``new_value.3`` lies among the layers' keys and values."""
    kind, _, layer = name.partition(".")
    return 2 * int(layer) + ("value" in kind)


def _window(name: str) -> int | None:
    """The sliding window that a mask input is for."""
    window = name.removeprefix(_MASK).removeprefix(".")
    return int(window) if window else None


def _buffer(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`count` elements whose first lies at a multiple of `ALIGNMENT` bytes."""
    raw = torch.empty(count * dtype.itemsize + ALIGNMENT, dtype=torch.uint8, device=device)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + count * dtype.itemsize].view(dtype)


def open_tensorrt(path: Path, kv_cache_tokens: int | None, threads: int | None) -> TensorRtEngine:
    """Open an engine folder of a TensorRT target on the GPU; `threads` has no use there."""
    from qtool.runtime.engines.tensorrt_cuda import CudaDevice, default_tokens, open_plan

    spec, info = read_spec(path), read_info(path)
    device = CudaDevice()
    plan = open_plan(path, info)
    return TensorRtEngine(
        spec,
        info,
        plan.new_context,
        device,
        kv_cache_tokens=kv_cache_tokens or default_tokens(spec, info),
        capture=not plan.captures,
    )
