"""Attention as a plugin: for which GPU, and whether there is a kernel for the model."""

from collections.abc import Callable
from functools import partial

import torch

from qtool.compile.backends.onnx import BLOCK_SIZE, Onnx
from qtool.compile.backends.onnx_graph import Graph
from qtool.compile.backends.onnx_plugin import PluginOnnx
from qtool.compile.config import DecoderConfig
from qtool.compile.kernels.spec import AttentionSpec
from qtool.core.lazy import load
from qtool.errors import UsageError


def plugin_operations(config: DecoderConfig) -> Callable[[Graph, torch.dtype, int], Onnx]:
    """What makes the graph's operations with the plugin, for the GPU present.

    Raises UsageError where Triton is not installed, and for a GPU or a shape that there is no kernel for.
    """
    known = load("qtool.compile.kernels.aot:SHARED_LIMITS", extra="kernels")
    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    if capability not in known:
        raise UsageError(
            f"attention: plugin has no kernel for compute capability {capability}, that of this GPU; it has "
            f"{', '.join(map(str, known))}; take attention: native"
        )
    shape = config.num_heads, config.num_kv_heads, config.head_dim, BLOCK_SIZE
    AttentionSpec(*shape, config.attention_scale)  # refuses a shape
    return partial(PluginOnnx, compute_capability=capability)
