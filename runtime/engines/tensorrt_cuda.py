"""TensorRT plans on a GPU: the part of the driver that nothing but a GPU can run."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from qtool.compile.backends.tensorrt.flavour import FLAVOURS, load
from qtool.compile.backends.tensorrt.info import PLAN, EngineInfo
from qtool.compile.engine import EngineSpec
from qtool.errors import QtoolError
from qtool.runtime.engines.pool import DEFAULT_TOKENS
from qtool.runtime.engines.tensorrt import Context

_SHARE = 0.5


class CudaDevice:
    """The current GPU, with a stream of its own."""

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise QtoolError(
                "a TensorRT engine runs on an NVIDIA GPU, and torch sees none here; for this machine compile "
                "with --target openvino"
            )
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._stream: torch.cuda.Stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self.stream = int(self._stream.cuda_stream)

    def active(self) -> AbstractContextManager[None]:
        """Within, torch queues its work on the stream too."""
        return torch.cuda.stream(self._stream)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record `work` as a CUDA graph; its replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            work()
        return graph.replay


@dataclass(frozen=True)
class OpenPlan:
    """A deserialized plan: TensorRT's own objects, which have to live as long as their contexts."""

    runtime: Any
    engine: Any
    config: Any
    captures: bool
    """The library makes CUDA graphs by itself."""

    def new_context(self) -> Context:
        """A context of no profile yet."""
        context: Context = self.engine.create_execution_context(self.config)
        return context


def open_plan(folder: Path, info: EngineInfo) -> OpenPlan:
    """Deserialize the plan of an engine folder.

    Raises QtoolError when it was built by another version or for other GPUs, and when TensorRT refuses it.
    """
    trt = load(FLAVOURS[info.target])
    if trt.__version__ != info.builder_version:
        raise QtoolError(
            f"{folder / PLAN}: was built by {info.target} {info.builder_version}, but {trt.__version__} is "
            "installed, and plans run in the version that built them; install that one or compile again"
        )
    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    if info.compute_capabilities and capability not in info.compute_capabilities:
        built = ", ".join(map(str, info.compute_capabilities))
        raise QtoolError(
            f"{folder / PLAN}: was built for compute capabilities {built}, this GPU has {capability}; "
            f"compile again with --cc {capability}"
        )
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    engine = runtime.deserialize_cuda_engine((folder / PLAN).read_bytes())
    if engine is None:
        raise QtoolError(f"{folder / PLAN}: {info.target} cannot open it; its log above says why")
    captures = hasattr(trt, "CudaGraphStrategy")
    return OpenPlan(runtime, engine, _runtime_config(trt, engine, captures), captures)


def _runtime_config(trt: ModuleType, engine: Any, captures: bool) -> Any:
    """Contexts with memory for their own profile alone; calls whose shapes come again as one CUDA graph."""
    config = engine.create_runtime_config()
    config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.ON_PROFILE_CHANGE)
    if captures:
        config.cuda_graph_strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
    return config


def default_tokens(spec: EngineSpec, info: EngineInfo) -> int:
    """Tokens of KV cache when none were asked for: as in `pool.num_blocks`, of the GPU's free memory."""
    free, _ = torch.cuda.mem_get_info()
    affordable = int(free * _SHARE) // spec.kv_bytes_per_token
    most = info.pool.max_blocks * info.pool.block_size
    return max(min(DEFAULT_TOKENS, affordable, most), info.pool.block_size)
