"""A plan and a GPU for the TensorRT driver where there is neither.

`StandInContext` answers to what the driver asks of an IExecutionContext. It runs the ONNX graph that the plan
was built from, reading and writing memory at the addresses it was given, and holds every call to what
``engine_info.json`` says of the plan, whose words come from the builder's inspector.
"""

import ctypes
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.compile.backends.tensorrt.info import EngineInfo, IoTensor, read_info
from qtool.compile.engine import EngineSpec, read_spec
from qtool.runtime.engines.onnx import open_session
from qtool.runtime.engines.tensorrt import ALIGNMENT, TensorRtEngine

DTYPES = {"Int32": np.int32, "Bool": np.bool_, "Half": np.float16, "Float": np.float32}


class Session(Protocol):
    """What runs the graph: outputs by name from inputs by name."""

    def run(self, names: list[str], feeds: dict[str, NDArray[np.generic]]) -> list[NDArray[np.generic]]: ...


class ContractError(AssertionError):
    """The driver asked for what the real engine would refuse, or not survive."""


@dataclass(frozen=True)
class Launch:
    """One execution: every tensor with its shape and address, as they were when it was queued."""

    run: Callable[[], None]


class HostDevice:
    """A GPU's stream and graphs on the host: what is captured keeps its shapes and addresses."""

    torch_device = torch.device("cpu")
    stream = 7

    def __init__(self) -> None:
        self.tape: list[Launch] | None = None
        self.num_captures = self.num_replays = 0

    def active(self) -> AbstractContextManager[None]:
        return nullcontext()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.tape, self.num_captures = [], self.num_captures + 1
        work()
        launches, self.tape = self.tape, None

        def replay() -> None:
            self.num_replays += 1
            for launch in launches:
                launch.run()

        return replay


class StandInContext:
    """An execution context that runs ONNX and refuses what its plan would refuse."""

    def __init__(self, info: EngineInfo, session: Session, device: HostDevice) -> None:
        self._info, self._session, self._device = info, session, device
        self._tensors = {tensor.name: tensor for tensor in info.tensors}
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self.launches: list[tuple[int, dict[str, tuple[int, ...]]]] = []
        """Profile and input shapes of each execution."""

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self._check_stream(stream_handle)
        self._profile, self._shapes = profile_index, {}
        return profile_index < len(self._info.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        tensor = self._known(name)
        if self._profile is None or tensor.mode != "input":
            raise ContractError(f"a shape for {name} without a profile, or for an output")
        bounds = tensor.profiles[self._profile]
        fits = len(shape) == len(bounds.low) and all(
            low <= size <= high for low, size, high in zip(bounds.low, shape, bounds.high, strict=True)
        )
        if fits:
            self._shapes[name] = tuple(shape)
        return fits

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._known(name)
        self._addresses[name] = memory
        return memory != 0 and memory % ALIGNMENT == 0

    def execute_async_v3(self, stream_handle: int) -> bool:
        self._check_stream(stream_handle)
        inputs = {name for name, tensor in self._tensors.items() if tensor.mode == "input"}
        if inputs != set(self._shapes) or set(self._tensors) != set(self._addresses):
            lacking = (inputs - set(self._shapes)) | (set(self._tensors) - set(self._addresses))
            raise ContractError(f"no shape or address for {sorted(lacking)}")
        shapes, addresses = dict(self._shapes), dict(self._addresses)
        launch = Launch(lambda: self._run(shapes, addresses))
        if self._device.tape is None:
            launch.run()
        else:
            self._device.tape.append(launch)
        return True

    def _run(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        self.launches.append((self._profile or 0, shapes))
        shapes = shapes | self._output_shapes(shapes)
        views = {name: _view(addresses[name], shape, self._tensors[name]) for name, shape in shapes.items()}
        _check_apart(views)
        self._check_values(views)
        names = [tensor.name for tensor in self._info.tensors if tensor.mode == "output"]
        feeds = {name: view for name, view in views.items() if name not in names}
        for name, result in zip(names, self._session.run(names, feeds), strict=True):
            if result.shape != views[name].shape or result.dtype != views[name].dtype:
                raise ContractError(f"{name} is {result.shape} {result.dtype}, not {views[name].shape}")
            views[name][...] = result

    def _output_shapes(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        (batch, tokens) = shapes["token_ids"]
        rows = {"logits": shapes["logit_rows"], "hidden_states": shapes.get("hidden_rows", ())}
        layout = self._info.pool
        entry = (batch, layout.num_kv_heads, tokens, layout.head_dim)
        found = {
            tensor.name: (*rows[tensor.name], tensor.shape[1]) if tensor.name in rows else entry
            for tensor in self._info.tensors
            if tensor.mode == "output"
        }
        for name, shape in found.items():
            if any(
                want not in (-1, size) for want, size in zip(self._tensors[name].shape, shape, strict=True)
            ):
                raise ContractError(f"{name} would be {shape}; the plan says {self._tensors[name].shape}")
        return found

    def _check_values(self, views: dict[str, NDArray[np.generic]]) -> None:
        """Indices that a GPU would follow out of bounds, and sizes that have to agree."""
        (batch, tokens), blocks = views["token_ids"].shape, views["block_tables"].shape[1]
        layout = self._info.pool
        num_blocks = views["key_pool.0"].shape[0] // layout.num_kv_heads
        limits = {
            "token_ids": views["logits"].shape[1],
            "positions": self._info.max_context,
            "block_tables": num_blocks,
            "logit_rows": batch * tokens,
            **({"hidden_rows": batch * tokens} if "hidden_rows" in views else {}),
        }
        for name, limit in limits.items():
            values = views[name]
            if values.min() < 0 or values.max() >= limit:
                raise ContractError(f"{name} holds {values.min()} to {values.max()}; wanted 0 to {limit - 1}")
        for name in (name for name in views if name.startswith("attention_mask")):
            mask = views[name]
            if mask.shape != (batch, 1, tokens, blocks * layout.block_size + tokens):
                raise ContractError(f"{name} is {mask.shape}")
            if mask.view(np.uint8).max() > 1 or not mask.any(-1).all():
                raise ContractError(f"{name} holds no booleans, or a row that sees nothing")

    def _known(self, name: str) -> IoTensor:
        if name not in self._tensors:
            raise ContractError(f"the plan has no tensor {name}")
        return self._tensors[name]

    def _check_stream(self, handle: int) -> None:
        if handle != self._device.stream:
            raise ContractError(f"work queued on stream {handle}")


def _view(address: int, shape: tuple[int, ...], tensor: IoTensor) -> NDArray[np.generic]:
    dtype = np.dtype(DTYPES[tensor.dtype])
    memory = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)


def _check_apart(views: dict[str, NDArray[np.generic]]) -> None:
    """No tensor of this plan shares memory with another: the builder aliases none."""
    ranges = sorted((view.ctypes.data, view.ctypes.data + view.nbytes, name) for name, view in views.items())
    for (_, end, name), (start, _, other) in combinations(ranges, 2):
        if start < end:
            raise ContractError(f"{name} and {other} share memory")


def open_stand_in(
    folder: Path, *, kv_cache_tokens: int, capture: bool = True
) -> tuple[TensorRtEngine, list[StandInContext], HostDevice]:
    """The driver over an engine folder that was built with keep_onnx; its contexts, one a profile."""
    session = open_session(folder / "model.onnx", 1)
    return open_with(
        session, read_spec(folder), read_info(folder), kv_cache_tokens=kv_cache_tokens, capture=capture
    )


def open_with(
    session: Session, spec: EngineSpec, info: EngineInfo, *, kv_cache_tokens: int, capture: bool
) -> tuple[TensorRtEngine, list[StandInContext], HostDevice]:
    """The driver over any session of a plan's graph; its contexts, one a profile."""
    device, contexts = HostDevice(), list[StandInContext]()

    def new_context() -> StandInContext:
        contexts.append(StandInContext(info, session, device))
        return contexts[-1]

    engine = TensorRtEngine(spec, info, new_context, device, kv_cache_tokens=kv_cache_tokens, capture=capture)
    return engine, contexts, device
