"""Real builds with the builder of tensorrt_rtx, which needs no GPU, and what becomes of those that fail."""

import json
import math
import resource
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import load_file, save_file

from qtool.compile.backends.tensorrt.checks import GraphFacts
from qtool.compile.backends.tensorrt.info import EngineInfo, Layer, LayerTensor, read_info
from qtool.compile.backends.tensorrt.inspector import Inspection, check_holds, inspect
from qtool.compile.backends.tensorrt.log import Line, faults
from qtool.compile.backends.tensorrt.process import run_build
from qtool.compile.backends.tensorrt.schemes import least_capability
from qtool.compile.backends.tensorrt.worker import BuildSpec, Phases
from qtool.compile.build import compile_engine
from qtool.compile.engine import read_spec
from qtool.core.recipe import TensorRtOptions
from qtool.core.schemes import Fp4Scheme, IntScheme, LinearScheme
from qtool.errors import QtoolError, UsageError
from tests.compile.checkpoints import write_family, write_quantized
from tests.compile.linears import NVFP4
from tests.compile.peer_checkpoints import write_compressed
from tests.compile.two_layers import LAYERS, write_two_layers

pytest.importorskip("tensorrt_rtx_bindings")
MLP = 3 * 576 * 1536
OPTIONS = TensorRtOptions(max_num_seqs=8, chunk=128, max_context=1024)


@pytest.fixture(scope="module")
def two_layers(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first two layers of SmolLM2 with 4-bit MLPs: one product with zero points, one without."""
    folder = tmp_path_factory.mktemp("smollm2")
    schemes = {
        "gate_proj": IntScheme(4, 64, False),
        "up_proj": IntScheme(4, 64, False),
        "down_proj": IntScheme(4, 64, True),
    }
    return write_two_layers(smollm2, folder / "model", schemes)


@pytest.fixture(scope="module")
def built(two_layers: Path) -> tuple[Path, float, list[tuple[str, float]]]:
    """The engine folder, the CPU seconds that the builder's process took, and the progress that was told."""
    told: list[tuple[str, float]] = []
    start = children_seconds()
    compile_engine(
        two_layers,
        "tensorrt-rtx",
        two_layers.with_name("engine"),
        tensorrt=OPTIONS,
        progress=lambda phase, share: told.append((phase, share)),
    )
    return two_layers.with_name("engine"), children_seconds() - start, told


def children_seconds() -> float:
    """CPU time of the processes that have been waited for: what else runs on the machine is not in it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture
def info(built: tuple[Path, float, list[tuple[str, float]]]) -> EngineInfo:
    return read_info(built[0])


def test_two_layers_build_for_four_gpus_in_time_for_ci(
    built: tuple[Path, float, list[tuple[str, float]]],
) -> None:
    folder, seconds, _ = built
    info, spec = read_info(folder), read_spec(folder)
    assert info.compute_capabilities == (80, 86, 89, 120)
    assert (spec.target, spec.kv_cache, spec.weight_bytes) == ("tensorrt-rtx", "f16", info.plan_bytes)
    assert spec.kv_bytes_per_token == LAYERS * 2 * 3 * 64 * 2
    assert spec.max_context == info.max_context == 1024
    assert (folder / "model.plan").stat().st_size == info.plan_bytes
    assert not list(folder.glob("*.onnx*"))
    assert not list(folder.glob("build.*"))
    assert (folder / "tokenizer.json").is_file()
    assert 0 < seconds < 15  # about 2


def test_the_plan_is_as_large_as_predicted(info: EngineInfo) -> None:
    table, attention = 49152 * 576 * 2, 2 * 576 * (576 + 192) * 2
    codes, scales, zeros = MLP // 2, MLP // 64 * 2, MLP * 2 // 3 // 64 * 2
    norms = 2 * 576 * 2
    weights = table + 576 * 2 + LAYERS * (attention + codes + scales + zeros + norms)
    rows = info.pool.max_blocks * 3
    assert info.predicted_weight_bytes - weights - 8 * rows in range(2000)  # shapes and frequencies
    assert abs(info.weight_bytes / info.predicted_weight_bytes - 1) < 0.01
    assert abs(info.plan_bytes / info.predicted_plan_bytes - 1) < 0.05


def test_the_inspector_found_every_profile_with_its_shapes(info: EngineInfo) -> None:
    tensors = {tensor.name: tensor for tensor in info.tensors}
    assert [profile.kind for profile in info.profiles] == ["prefill", "decode", "verify"]
    assert all(profile.activation_bytes > 1 << 20 for profile in info.profiles)
    assert tensors["token_ids"].dtype == "Int32"
    assert tensors["token_ids"].profiles == (
        ((1, 1), (1, 128), (2, 128)),
        ((1, 1), (4, 1), (8, 1)),
        ((1, 2), (4, 5), (8, 5)),
    )
    assert tensors["attention_mask"].profiles[2].high == (8, 1, 5, 1024 + 5)
    assert (tensors["attention_mask"].dtype, tensors["logits"].dtype) == ("Bool", "Float")
    assert tensors["key_pool.1"].shape == (-1, 32, 64)
    new = {name for name, tensor in tensors.items() if tensor.mode == "output"}
    assert new == {"logits", "new_key.0", "new_value.0", "new_key.1", "new_value.1"}


def test_every_profile_multiplies_packed_codes_inside_the_product(info: EngineInfo) -> None:
    """A constant in 4 bits beside its scales, in a kernel that writes 16-bit activations: no dense copy."""
    for profile in range(3):
        layers = [layer for layer in info.layers if layer.profile == profile]
        packed = [layer for layer in layers if any(c.dtype == "Int4" for c in layer.constants)]
        assert len(packed) == 2 * LAYERS  # gate and up together, down
        constants = [constant for layer in packed for constant in layer.constants]
        codes = [math.prod(constant.shape) for constant in constants if constant.dtype == "Int4"]
        assert sum(codes) == LAYERS * MLP
        assert all(math.prod(layer.outputs[0].shape[-1:]) in (3072, 576) for layer in packed)
        attention = [layer for layer in layers if any("Attention" in node for node in layer.nodes)]
        assert any("mha" in layer.name for layer in attention)  # one fused kernel, not its parts


def test_the_correction_of_zero_points_is_a_small_product_of_its_own(info: EngineInfo) -> None:
    assert info.folded_zero_points == LAYERS
    assert info.requantized == {}
    corrections = [
        constant
        for layer in info.layers
        for constant in layer.constants
        if constant.dtype == "Half" and constant.shape[-1:] == (3072,) and constant.shape[0] in (9, 10)
    ]
    assert len(corrections) >= 3 * LAYERS


def test_progress_goes_from_nothing_to_the_end(
    built: tuple[Path, float, list[tuple[str, float]]],
) -> None:
    shares = [share for _, share in built[2]]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < 0.6 < shares[-1] <= 1


def test_requantizing_is_said_and_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_family("llama", tmp_path / "source")
    checkpoint = write_quantized(source, tmp_path / "model", {"mlp": IntScheme(4, 32, False)})
    options = TensorRtOptions(
        compute_capabilities=(89,), draft_tokens=0, zero_points="requantize", max_context=64
    )
    compile_engine(checkpoint, "tensorrt-rtx", tmp_path / "engine", tensorrt=options)
    info = read_info(tmp_path / "engine")
    assert len(info.requantized) == 9
    assert "9 asymmetric linears were rounded again" in caplog.text
    assert len(info.profiles) == 2


def test_what_the_library_cannot_do_is_refused_before_any_work(tiny: Path, tmp_path: Path) -> None:
    options = TensorRtOptions(compute_capabilities=(80, 90))
    source = write_family("llama", tmp_path / "source")
    with pytest.raises(UsageError, match=r"capability 90 is not supported by tensorrt-rtx"):
        compile_engine(source, "tensorrt-rtx", tmp_path / "engine", tensorrt=options)
    with pytest.raises(QtoolError, match="3 attention heads: tensorrt-rtx has no attention kernel for fewer"):
        compile_engine(tiny, "tensorrt-rtx", tmp_path / "engine")
    assert not list(tmp_path.glob("*engine*"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "fp8",
            r"quantized as fp8, channel, which GPUs of compute capability 80, 86 do not know, only those",
        ),
        ("fp8 dynamic", r"from 89 on; build for the others alone, --cc 89,120"),
    ],
)
def test_formats_that_a_gpu_does_not_know_are_refused_before_any_work(
    name: str, said: str, tmp_path: Path
) -> None:
    checkpoint = write_compressed(write_family("llama", tmp_path / "source"), tmp_path / "model", name)
    with pytest.raises(UsageError, match=said):
        compile_engine(checkpoint, "tensorrt-rtx", tmp_path / "engine")
    assert not list(tmp_path.glob("*engine*"))


def test_nvfp4_products_are_for_blackwell(tmp_path: Path) -> None:
    assert [least_capability(scheme) for scheme in (NVFP4, LinearScheme(Fp4Scheme("nvfp4")))] == [100, 0]


# What fails


def spec_for(
    folder: Path, nodes: list[onnx.NodeProto], shapes: dict[str, list[int]], **more: object
) -> BuildSpec:
    """A build of a graph from float16 inputs to y, in opset 24."""
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape) for name, shape in shapes.items()
    ]
    inputs += [more["extra"]] if "extra" in more else []
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)
    weights = [numpy_helper.from_array(*pair) for pair in more.get("weights", [])]
    weights += more.get("tensors", [])
    graph = helper.make_graph(nodes, "g", inputs, [output], initializer=weights)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("qtool", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=11), folder / "g.onnx")
    return BuildSpec(
        target="tensorrt-rtx",
        model=folder / "g.onnx",
        plan=folder / "g.plan",
        log=folder / "g.log",
        compute_capabilities=(89,),
        profiles=(),
    )


def silent(phase: str, share: float) -> None:
    """Progress that nobody sees."""


QKV = {"q": [1, 2, 4, 64], "k": [1, 2, 8, 64], "v": [1, 2, 8, 64]}
MASK = helper.make_tensor_value_info("mask", TensorProto.BOOL, [1, 1, 4, 8])


def test_an_input_that_the_builder_would_drop_fails_the_build(tmp_path: Path) -> None:
    attend = helper.make_node("Attention", ["q", "k", "v", "", "", "", "lengths"], ["y"])
    lengths = helper.make_tensor_value_info("lengths", TensorProto.INT64, [1])
    with pytest.raises(QtoolError, match="Unused Input: lengths"):
        run_build(spec_for(tmp_path, [attend], QKV, extra=lengths), silent)
    assert (tmp_path / "g.plan").is_file()  # to the builder it was a success


def test_an_error_of_the_builder_is_told_in_its_words(tmp_path: Path) -> None:
    attend = helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"], is_causal=1)
    with pytest.raises(QtoolError, match="mask cannot be used together with CausalMaskKind"):
        run_build(spec_for(tmp_path, [attend], QKV, extra=MASK), silent)
    unknown = helper.make_node("PagedAttention", ["q"], ["y"], domain="qtool")
    with pytest.raises(QtoolError, match="Plugin not found"):
        run_build(spec_for(tmp_path, [unknown], QKV), silent)


def test_scales_that_are_not_beside_their_codes_are_noticed(tmp_path: Path) -> None:
    """The silent miscompile of tensorrt_rtx 1.7.1, built past the check that refuses it."""
    import numpy as np

    codes = helper.make_tensor("w", TensorProto.INT4, [64, 96], bytes(range(256)) * 12, raw=True)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "a", "z"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "a", "z"], ["xd"]),
        helper.make_node("DequantizeLinear", ["w", "s"], ["wd"], axis=0, block_size=32),
        helper.make_node("MatMul", ["xd", "wd"], ["y"]),
    ]
    weights = [
        (np.full((2, 96), 0.5, np.float16), "s"),
        (np.array(0.05, np.float16), "a"),
        (np.array(0, np.int8), "z"),
    ]
    lines = run_build(spec_for(tmp_path, nodes, {"x": [8, 64]}, weights=weights, tensors=[codes]), silent)
    facts = GraphFacts(weight_bytes=0, int4_codes=64 * 96, int4_blocks=frozenset({32}), inputs={})
    with pytest.raises(QtoolError, match=r"6144 weights in 4 bits without a scale for each block of 32"):
        check_holds(inspect(lines), facts, 1)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("import os, sys; print('last words', file=sys.stderr); os.abort()", r"SIGABRT.*\n  last words"),
        ("import sys; sys.exit(5)", r"ended with exit code 5.*\n  nothing"),
    ],
)
def test_a_builder_that_crashes_is_an_error_with_its_last_words(
    script: str, said: str, tmp_path: Path
) -> None:
    spec = spec_for(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], {"x": [8, 64]})
    with pytest.raises(QtoolError, match=said):
        run_build(spec, silent, command=(sys.executable, "-c", script))


def test_a_disk_without_room_for_the_plan_is_what_is_told(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], {"x": [8, 64]})
    script = f"open({str(spec.plan)!r}, 'wb').write(bytes(3_000_000))"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_500_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            run_build(spec, silent, command=(sys.executable, "-c", script))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_weight_beyond_float16_is_named_before_the_build(tmp_path: Path) -> None:
    checkpoint = write_family("llama", tmp_path / "model")
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = 1e5
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(QtoolError, match=r"model: model\.layers\.1\.mlp\.up_proj\.weight reaches 100000"):
        compile_engine(checkpoint, "tensorrt-rtx", tmp_path / "engine")


def test_a_context_beyond_the_model_s_is_refused(tmp_path: Path) -> None:
    checkpoint = write_family("llama", tmp_path / "model")
    with pytest.raises(UsageError, match="was made for 512 positions, max_context is 513"):
        compile_engine(
            checkpoint, "tensorrt-rtx", tmp_path / "engine", tensorrt=TensorRtOptions(max_context=513)
        )


def test_the_log_of_a_crash_is_told(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], {"x": [8, 64]})
    log = json.dumps(["INFO", "building kernel 7"])
    script = f"import os; open({str(spec.log)!r}, 'w').write({log + chr(10)!r}); os.kill(os.getpid(), 11)"
    with pytest.raises(QtoolError, match=r"SIGSEGV.*\n  INFO: building kernel 7"):
        run_build(spec, silent, command=(sys.executable, "-c", script))


def test_an_interrupted_build_leaves_no_process(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], {"x": [8, 64]})

    def interrupt(phase: str, share: float) -> None:
        raise KeyboardInterrupt

    script = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); " + (
        "print('[\"building\", 0.5]', flush=True); time.sleep(60)"
    )
    with pytest.raises(KeyboardInterrupt):
        run_build(spec, interrupt, command=(sys.executable, "-c", script))
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


# The log, the phases and the inspector's text, without a builder


def test_warnings_fail_a_build_unless_they_are_known_to_be_harmless() -> None:
    lines = [
        Line("VERBOSE", "Disabling unused tactic source: JIT_CONVOLUTIONS"),
        Line("WARNING", "ModelImporter.cpp:1071: Make sure input ids has Int64 binding."),
        Line("INFO", "Engine generation completed in 1.3 seconds."),
    ]
    assert list(faults(lines)) == []
    bad = [
        Line("WARNING", "Something new"),
        Line("VERBOSE", "Unused Input: n"),
        Line("INTERNAL_ERROR", "Bug"),
    ]
    assert list(faults([*lines, *bad])) == ["warning: Something new", "Unused Input: n", "Bug"]


def test_nested_phases_make_one_share_that_never_shrinks() -> None:
    phases = Phases()
    phases.start("build", None, 2)
    phases.start("parse", "build", 4)
    assert [phases.advance("parse", step) for step in range(4)] == [0.125, 0.25, 0.375, 0.5]
    assert phases.advance("build", 0) == 0.5
    phases.start("tactics", "build", 1)
    phases.start("timing", "tactics", 2)
    assert phases.advance("timing", 0) == 0.75
    phases.start("timing", "tactics", 10)  # again, from its start
    assert phases.advance("timing", 0) == 0.75
    assert phases.advance("build", 1) == 1.0


def holding(*constants: tuple[str, tuple[int, ...]], profile: int = 0) -> Layer:
    tensors = tuple(LayerTensor(dtype=dtype, shape=shape) for dtype, shape in constants)
    return Layer(name="fc", kind="gemm", profile=profile, inputs=(), constants=tensors, outputs=(), nodes=())


def test_weights_that_every_call_writes_out_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """8-bit groups, which tensorrt_rtx 1.7.1 does not multiply as they are; 4-bit channels it does, split."""
    source = write_family("llama", tmp_path / "source")
    schemes = {"gate_proj": IntScheme(4, None, True), "down_proj": IntScheme(8, 32, True)}
    checkpoint = write_quantized(source, tmp_path / "model", schemes)
    options = TensorRtOptions(compute_capabilities=(89,), draft_tokens=0, max_context=64)
    compile_engine(checkpoint, "tensorrt-rtx", tmp_path / "engine", tensorrt=options)
    assert "6 kernels write quantized weights out" in caplog.text  # down_proj, 3 layers, 2 profiles


def test_a_plan_is_held_to_the_weights_of_its_graph() -> None:
    facts = GraphFacts(weight_bytes=0, int4_codes=64 * 96, int4_blocks=frozenset({32}), inputs={})
    whole = holding(("Int4", (1, 64, 96)), ("Half", (1, 2, 96)))
    check_holds(Inspection((whole,), (), 0, ()), facts, 1)
    halves = [holding(("Int4", (64, 48)), ("Half", (2, 48))) for _ in range(2)]
    check_holds(Inspection(tuple(halves), (), 0, ()), facts, 1)
    with pytest.raises(QtoolError, match="holds 3072 weights in 4 bits, the graph 6144"):
        check_holds(Inspection((halves[0],), (), 0, ()), facts, 1)
    with pytest.raises(QtoolError, match="without a scale for each block of 32"):
        check_holds(Inspection((holding(("Int4", (64, 96)), ("Half", (96,))),), (), 0, ()), facts, 1)
    with pytest.raises(QtoolError, match="no layers for profile 1"):
        check_holds(Inspection((whole,), (), 0, ()), facts, 2)


def test_a_plan_is_held_to_the_kernels_that_multiply_codes() -> None:
    def layer(read: str, written: str) -> Layer:
        tensors = [LayerTensor(dtype=dtype, shape=(8, 96)) for dtype in (read, written)]
        codes = LayerTensor(dtype="Int8", shape=(96, 64))
        layer = holding()
        return layer.model_copy(
            update={"inputs": (tensors[0],), "constants": (codes,), "outputs": (tensors[1],)}
        )

    facts = GraphFacts(0, 0, frozenset(), {}, multiplied_codes={"Int8": 96 * 64})
    check_holds(Inspection((layer("Int8", "Float"),), (), 0, ()), facts, 1)
    with pytest.raises(
        QtoolError, match="multiplies 0 weights as Int8 codes, the graph 6144: for the others"
    ):
        check_holds(Inspection((layer("Half", "Half"),), (), 0, ()), facts, 1)
    with pytest.raises(QtoolError, match="gives the bare sums in Half: they would overflow"):
        check_holds(Inspection((layer("Int8", "Half"),), (), 0, ()), facts, 1)


def test_a_log_without_the_inspector_s_text_is_an_error() -> None:
    with pytest.raises(QtoolError, match="holds no inspector text"):
        inspect([Line("INFO", "Engine generation completed")])
    with pytest.raises(QtoolError, match="describes a layer in unknown words: Nom: x"):
        inspect(
            [
                Line("VERBOSE", "Layers:\nNom: x\n\nI/O Tensors:\n"),
                Line("INFO", "Total Weights Memory: 8 bytes"),
            ]
        )


def test_a_record_that_is_damaged_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "engine_info.json").write_text('{"target": 3}')
    with pytest.raises(QtoolError, match=r"engine_info\.json: target: .*compile the checkpoint again"):
        read_info(tmp_path)
