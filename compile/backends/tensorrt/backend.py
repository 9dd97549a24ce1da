"""Write a TensorRT engine: the ONNX graph, the plan built from it, and the record of both."""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch

from qtool.compile.backends.onnx import BLOCK_SIZE, DATA, write_onnx
from qtool.compile.backends.onnx_tensorrt import TensorRtOnnx
from qtool.compile.backends.tensorrt.checks import read_graph
from qtool.compile.backends.tensorrt.flavour import FLAVOURS, capabilities, check_gpu, load
from qtool.compile.backends.tensorrt.info import (
    PLAN,
    EngineInfo,
    PoolLayout,
    ProfileInfo,
    predict_plan_bytes,
    predict_weight_bytes,
)
from qtool.compile.backends.tensorrt.inspector import Inspection, check_holds, count_unpacked, inspect
from qtool.compile.backends.tensorrt.plugins import plugin_operations
from qtool.compile.backends.tensorrt.process import Progress, run_build
from qtool.compile.backends.tensorrt.profiles import Profile, plan_profiles
from qtool.compile.backends.tensorrt.schemes import check_formats
from qtool.compile.backends.tensorrt.weights import InRange, PairedFp4, SplitChannels, SymmetricWeights
from qtool.compile.backends.tensorrt.worker import BuildSpec
from qtool.compile.backends.tensorrt.zero_points import fold_zero_points
from qtool.compile.config import DecoderConfig
from qtool.compile.decoder import Weights
from qtool.compile.hidden import HiddenLayer
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.core.recipe import TensorRtOptions
from qtool.errors import QtoolError

_LEAST_HEADS = 4
"""tensorrt_rtx 1.7.1 refuses 1 to 3 query heads in every size and grouping that was tried."""
_log = logging.getLogger(__name__)


def write(
    checkpoint: Checkpoint,
    config: DecoderConfig,
    folder: Path,
    hidden_layers: Sequence[HiddenLayer] = (),
    *,
    target: str,
    tensorrt: TensorRtOptions,
    progress: Progress,
) -> None:
    """Write ``model.plan`` and ``engine_info.json`` into `folder`.

    Raises as `write_engine` does, and UsageError for a number format that one of the GPUs lacks.
    """
    check_formats(checkpoint, FLAVOURS[target], tensorrt.compute_capabilities)
    weights = InRange(CheckpointWeights(config, checkpoint), str(checkpoint.path))
    write_engine(weights, config, folder, target, tensorrt, progress, hidden_layers)


def write_engine(
    weights: Weights,
    config: DecoderConfig,
    folder: Path,
    target: str,
    options: TensorRtOptions,
    progress: Progress,
    hidden_layers: Sequence[HiddenLayer] = (),
) -> EngineInfo:
    """Build the decoder for `target`. It computes in float16, and its pools hold that.

    There is no float32 engine: TensorRT has no attention kernel for it, and refuses the graph.

    Raises UsageError for a compute capability that the library does not know, QtoolError when the library
    is missing or has no kernel for the model, a GPU is needed, or the builder fails, crashes, warns or drops
    a part of the graph.
    """
    if config.num_heads < _LEAST_HEADS:
        raise QtoolError(
            f"{config.architecture} with {config.num_heads} attention heads: {target} has no attention "
            f"kernel for fewer than {_LEAST_HEADS}; compile for another target"
        )
    flavour = FLAVOURS[target]
    trt = load(flavour)
    check_gpu(flavour)
    chosen = capabilities(flavour, trt, options.compute_capabilities)
    profiles = plan_profiles(options, config, BLOCK_SIZE)
    errors: dict[str, float] = {}
    if options.zero_points == "requantize":
        weights = SymmetricWeights(weights, errors)
    weights = SplitChannels(PairedFp4(weights))
    plugins = options.attention == "plugin"
    model = write_onnx(
        config,
        weights,
        folder,
        dtype=torch.float16,
        hidden_layers=hidden_layers,
        make=plugin_operations(config) if plugins else TensorRtOnnx,
    )
    folded = fold_zero_points(model)
    facts = read_graph(model, plugins=plugins)
    spec = BuildSpec(
        target=target,
        model=model,
        plan=folder / PLAN,
        log=folder / "build.log",
        compute_capabilities=chosen,
        plugins=plugins,
        profiles=tuple(
            {name: tuple(profile.shapes(dimensions)) for name, dimensions in facts.inputs.items()}
            for profile in profiles
        ),
    )
    lines = run_build(spec, progress)
    inspection = inspect(lines)
    check_holds(inspection, facts, len(profiles))
    predicted = predict_weight_bytes(facts.weight_bytes, profiles[0].sizes["pool_rows"].high)
    info = EngineInfo(
        target=target,
        builder_version=trt.__version__,
        compute_capabilities=chosen,
        plan_bytes=spec.plan.stat().st_size,
        weight_bytes=inspection.weight_bytes,
        predicted_weight_bytes=predicted,
        predicted_plan_bytes=predict_plan_bytes(
            predicted, config.num_layers, len(profiles), facts.products_of_codes
        ),
        profiles=_profile_infos(profiles, inspection),
        pool=_pool_layout(config, profiles[0]),
        max_context=min(options.max_context or config.max_context, config.max_context),
        tensors=inspection.tensors,
        folded_zero_points=folded,
        requantized=errors,
        layers=inspection.layers,
    )
    info.save(folder)
    _report(info, count_unpacked(inspection))
    for left in (spec.log, spec.log.with_suffix(".stderr")):
        left.unlink()
    if not options.keep_onnx:
        model.unlink()
        (folder / DATA).unlink()
    return info


def _profile_infos(profiles: list[Profile], inspection: Inspection) -> tuple[ProfileInfo, ...]:
    return tuple(
        ProfileInfo(
            kind=profile.kind,
            sizes={name: tuple(size) for name, size in profile.sizes.items()},
            activation_bytes=activation_bytes,
        )
        for profile, activation_bytes in zip(profiles, inspection.activation_bytes, strict=True)
    )


def _pool_layout(config: DecoderConfig, profile: Profile) -> PoolLayout:
    return PoolLayout(
        dtype="Half",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        block_size=BLOCK_SIZE,
        head_dim=config.head_dim,
        max_blocks=profile.sizes["pool_rows"].high // config.num_kv_heads,
    )


def _report(info: EngineInfo, unpacked: int) -> None:
    if unpacked:
        _log.warning(
            "%d kernels write quantized weights out in 16 bits for a product to read back, at every call: "
            "slower than weights that are not quantized; %s takes 4-bit groups and 8-bit channels packed",
            unpacked,
            info.target,
        )
    if info.requantized:
        worst = min(info.requantized, key=info.requantized.__getitem__)
        _log.warning(
            "%d asymmetric linears were rounded again without zero points: signal to noise %.1f dB on "
            "average, %.1f dB in %s; zero_points: exact would add none",
            len(info.requantized),
            sum(info.requantized.values()) / len(info.requantized),
            info.requantized[worst],
            worst,
        )
    if info.weight_bytes > 1.05 * info.predicted_weight_bytes:
        _log.warning(
            "the plan holds %d bytes of constants, %d were expected: the builder keeps some of them twice",
            info.weight_bytes,
            info.predicted_weight_bytes,
        )
