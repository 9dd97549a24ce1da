"""Paged attention as quickly deployable TensorRT plugins whose kernels are compiled ahead of time.

Two plugins, `qtool::attend` and `qtool::merge`: a plugin launches one kernel. Graphs with them are written by
`qtool.compile.backends.onnx_plugin`; TensorRT's parser finds them by name, version 1 and namespace. The
kernels go into the engine: to run it takes neither Python nor Triton.

`tensorrt` (10.9 and later) is imported when the plugins are registered; TensorRT-RTX has none of this.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from qtool.compile.kernels.aot import compile_ahead, compile_merge
from qtool.compile.kernels.spec import (
    WANTED_PROGRAMS,
    AttentionSpec,
    Dtype,
    PoolDtype,
    grid,
    max_partial_rows,
    num_splits,
    tiles,
)

INPUTS = (
    "queries",
    "new_keys",
    "new_values",
    "key_pool",
    "value_pool",
    "block_tables",
    "past_lens",
    "new_starts",
    "positions",
    "tree",
    "key_scales",
    "value_scales",
)
"""Tensors of `attend`, shaped as its source says. Without a tree or an 8-bit pool, constants stand for the
last three: [1, 1] bool, and [1] float32 twice."""

MERGED = ("parts", "lse", "queries", "block_tables")
"""Tensors of `merge`: the outputs of `attend`, and two of its inputs for their shapes."""

ATTRIBUTES: dict[str, type] = {
    "num_heads": int,
    "num_kv_heads": int,
    "head_dim": int,
    "block_size": int,
    "scale": float,
    "window": int,
    "has_tree": int,
    "compute_capability": int,
}
"""Of both plugins."""

Tensors = Mapping[str, Any]
Attributes = Mapping[str, Any]


@cache
def register() -> None:
    """Describe both plugins to TensorRT, once for a process: a parser then finds them in its registry."""
    import tensorrt as trt
    import tensorrt.plugin as trtp

    dtypes: dict[Any, Dtype] = {trt.float16: "float16", trt.bfloat16: "bfloat16"}
    pool_dtypes: dict[Any, PoolDtype] = {**dtypes, trt.int8: "int8", trt.fp8: "float8_e4m3"}

    def spec_of(tensors: Tensors, attributes: Attributes) -> AttentionSpec:
        pool = tensors.get("key_pool", tensors["queries"])  # what `merge` does depends on no pool
        shape = ("num_heads", "num_kv_heads", "head_dim", "block_size", "scale", "window")
        return AttentionSpec(
            **{name: attributes[name] for name in shape},
            tree=bool(attributes["has_tree"]),
            dtype=dtypes[tensors["queries"].dtype],
            pool_dtype=pool_dtypes[pool.dtype],
            split=True,
        )

    def extent(tensors: Tensors) -> tuple[Any, Any, Any]:
        """T, B and max_blocks, symbolic."""
        return tensors["queries"].shape_expr[0], *tensors["block_tables"].shape_expr

    def splits(spec: AttentionSpec, tensors: Tensors) -> Any:
        return num_splits(spec, *extent(tensors), trtp.ShapeExpr(WANTED_PROGRAMS), trtp.min, trtp.max)

    def describe_attend(tensors: Tensors, attributes: Attributes) -> Any:
        spec = spec_of(tensors, attributes)
        # Not [S, T]: nothing says that memory is set aside for the largest product and not for the largest T.
        rows = max_partial_rows(spec, extent(tensors)[0], trtp.max), spec.num_heads
        parts = trtp.from_shape_expr((*rows, spec.head_dim), trt.float32)
        return parts, trtp.from_shape_expr(rows, trt.float32)

    def tune_attend(tensors: Tensors, attributes: Attributes, outputs: Any) -> Any:
        # The narrow and the wide tile, which TensorRT times for each optimization profile.
        kinds = ",".join(tensor.dtype.name for tensor in (*tensors.values(), *outputs))
        return [trtp.AutoTuneCombination(kinds, "LINEAR", [1, 2])]

    def implement_attend(tensors: Tensors, attributes: Attributes, outputs: Any, tactic: int) -> Any:
        spec = spec_of(tensors, attributes)
        tile = tiles(spec)[tactic - 1]
        kernel = compile_ahead(spec, attributes["compute_capability"], tile)
        tokens, sequences, max_blocks = extent(tensors)
        programs = grid(spec, tile, tokens, sequences, splits(spec, tensors))
        launch = trtp.KernelLaunchParams(*programs, block_x=kernel.threads, shared_mem=kernel.shared)
        scalars = (tokens, sequences, max_blocks, tensors["tree"].shape_expr[1])
        return kernel.name, kernel.ptx, launch, trtp.SymIntExprs.from_tuple(scalars)

    def describe_merge(tensors: Tensors, attributes: Attributes) -> Any:
        return trtp.from_shape_expr(tuple(tensors["queries"].shape_expr), tensors["queries"].dtype)

    def implement_merge(tensors: Tensors, attributes: Attributes, outputs: Any, tactic: int) -> Any:
        spec = spec_of(tensors, attributes)
        rows = extent(tensors)[0] * spec.num_heads
        kernel = compile_merge(spec.head_dim, spec.dtype, attributes["compute_capability"])
        launch = trtp.KernelLaunchParams(grid_x=rows, block_x=kernel.threads, shared_mem=kernel.shared)
        return kernel.name, kernel.ptx, launch, trtp.SymIntExprs.from_tuple((rows, splits(spec, tensors)))

    one, two = trtp.TensorDesc, tuple[trtp.TensorDesc, trtp.TensorDesc]
    implementation = tuple[str, str, trtp.KernelLaunchParams, trtp.SymExprs]
    attend = partial(_declared, dict.fromkeys(INPUTS, one), ATTRIBUTES)
    merge = partial(_declared, dict.fromkeys(MERGED, one), ATTRIBUTES)
    trtp.register("qtool::attend")(attend(describe_attend, {}, two))
    trtp.autotune("qtool::attend")(attend(tune_attend, {"outputs": two}, list[trtp.AutoTuneCombination]))
    outputs = {"outputs": two, "tactic": int}
    trtp.aot_impl("qtool::attend")(attend(implement_attend, outputs, implementation))
    trtp.register("qtool::merge")(merge(describe_merge, {}, one))
    outputs = {"outputs": tuple[trtp.TensorDesc], "tactic": int}
    trtp.aot_impl("qtool::merge")(merge(implement_merge, outputs, implementation))


def _declared(
    tensors: Mapping[str, Any],
    attributes: Mapping[str, type],
    body: Callable[..., Any],
    rest: Mapping[str, Any],
    returns: Any,
) -> Callable[..., Any]:
    """`body(tensors, attributes, *rest)` as a function with a parameter for each, annotated.

    TensorRT reads a plugin's inputs and attributes off its functions' signatures, and wants the same long one
    three times.
    """
    parameters = {**tensors, **attributes, **rest}

    def function(*arguments: Any, **named: Any) -> Any:
        given = dict(zip(parameters, arguments, strict=False)) | named
        return body(
            {name: given[name] for name in tensors},
            {name: given[name] for name in attributes},
            *(given[name] for name in rest),
        )

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature(
        [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in parameters.items()],
        return_annotation=returns,
    )
    vars(function)["__signature__"] = signature
    return function
