"""The bounds of calls, and which GPUs an engine can be built for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qtool.compile.backends.tensorrt.flavour import FLAVOURS, Flavour, capabilities, check_gpu, load
from qtool.compile.backends.tensorrt.profiles import Range, check_limits, plan_profiles
from qtool.compile.config import DecoderConfig, read_config
from qtool.core.recipe import TensorRtOptions
from qtool.errors import QtoolError, UsageError
from tests.compile.checkpoints import SHAPE

RTX, PROPER = FLAVOURS["tensorrt-rtx"], FLAVOURS["tensorrt"]


@pytest.fixture
def config() -> DecoderConfig:
    """2 KV heads of 16 features, 512 positions."""
    fields = {**SHAPE, "architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    return read_config(fields, "config.json")


def test_the_serving_limits_become_the_bounds_of_three_profiles(config: DecoderConfig) -> None:
    options = TensorRtOptions(max_num_seqs=6, chunk=100, max_context=200, draft_tokens=3)
    prefill, decode, verify = plan_profiles(options, config, block_size=32)
    assert [profile.kind for profile in (prefill, decode, verify)] == ["prefill", "decode", "verify"]
    assert (prefill.sizes["S"], prefill.sizes["R"]) == (Range(1, 100, 100), Range(1, 1, 100))
    assert (decode.sizes["B"], decode.sizes["S"]) == (Range(1, 3, 6), Range(1, 1, 1))
    assert (verify.sizes["S"], verify.sizes["R"]) == (Range(2, 4, 4), Range(1, 12, 24))
    assert all(profile.sizes["M"] == Range(1, 3, 7) for profile in (prefill, decode, verify))
    assert verify.shapes(["B", 1, "S", "P+S"]) == [(1, 1, 2, 34), (3, 1, 4, 100), (6, 1, 4, 228)]
    assert decode.shapes(["pool_rows", 32, 16])[2] == (2 * 2 * 6 * 7, 32, 16)  # heads, twice what is needed


def test_without_drafts_there_is_no_verify_profile(config: DecoderConfig) -> None:
    options = TensorRtOptions(draft_tokens=0)
    assert [profile.kind for profile in plan_profiles(options, config, 32)] == ["prefill", "decode"]


def test_limits_beyond_the_model_are_cut_to_it(config: DecoderConfig) -> None:
    prefill = plan_profiles(TensorRtOptions(chunk=4096, max_context=10**6), config, 32)[0]
    assert (prefill.sizes["S"].high, prefill.sizes["M"].high) == (512, 16)


def test_a_pool_never_has_more_elements_than_tensorrt_counts(config: DecoderConfig) -> None:
    profile = plan_profiles(TensorRtOptions(max_num_seqs=10**6), config, 32)[0]
    low, best, high = profile.sizes["pool_rows"]
    assert high * 32 * 16 < 2**31 <= (high + 2) * 32 * 16
    assert low <= best <= high


def library(*names: str) -> Any:
    return SimpleNamespace(
        __version__="1.7", ComputeCapability=SimpleNamespace(__members__=dict.fromkeys(("NONE", *names)))
    )


def test_compute_capabilities_are_checked_against_the_library() -> None:
    trt = library("SM75", "SM80", "SM86", "SM89", "SM120")
    assert capabilities(RTX, trt, (89, 80, 89)) == (80, 89)
    assert capabilities(RTX, trt, ()) == (80, 86, 89, 120)
    with pytest.raises(
        UsageError,
        match=r"capability 90 is not supported by tensorrt-rtx 1\.7; wanted some of 75, 80.*tensorrt",
    ):
        capabilities(RTX, trt, (80, 90))


def test_tensorrt_proper_builds_for_the_gpu_present_alone() -> None:
    assert capabilities(PROPER, library(), ()) == ()
    with pytest.raises(UsageError, match="builds for the GPU present alone; leave --cc out"):
        capabilities(PROPER, library(), (90,))


def test_tensorrt_proper_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    check_gpu(RTX)
    with pytest.raises(
        QtoolError, match="torch sees none here; compile on that machine, or for tensorrt-rtx"
    ):
        check_gpu(PROPER)


def test_a_library_that_is_missing_is_named_with_its_extra() -> None:
    missing = Flavour("tensorrt-xyz", ("no_such_module", "nor_this_one"), "tensorrt-xyz", (80,))
    with pytest.raises(QtoolError, match=r"nor_this_one.*pip install -e '\.\[tensorrt-xyz\]'"):
        load(missing)


def test_more_drafts_than_a_sequence_has_tokens_are_refused(config: DecoderConfig) -> None:
    folder = Path("model")
    check_limits(TensorRtOptions(max_context=200, draft_tokens=199), config, folder)
    for options in (TensorRtOptions(max_context=200, draft_tokens=200), TensorRtOptions(draft_tokens=999999)):
        with pytest.raises(UsageError, match=r"take (199|511) or fewer"):
            check_limits(options, config, folder)


def test_more_logits_than_a_tensor_holds_are_refused(config: DecoderConfig) -> None:
    with pytest.raises(UsageError, match="lower max_num_seqs or draft_tokens"):
        check_limits(TensorRtOptions(max_num_seqs=2**31, draft_tokens=4), config, Path("model"))
