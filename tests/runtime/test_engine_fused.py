"""The torch engine of GPUs: on a CPU in Triton's interpreter, and what is refused where there is no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from qtool.compile.backends.fused import Fused
from qtool.compile.backends.reference import Dense
from qtool.compile.build import compile_engine
from qtool.compile.layers import Mixture
from qtool.core.formats import compressed_tensors
from qtool.core.formats.kv_cache import KvLayout
from qtool.core.qtensor import KvScales
from qtool.core.schemes import KvCacheScheme
from qtool.errors import UsageError
from qtool.runtime.engines import open_engine
from tests.compile.checkpoints import edit_config, write_family

ROOT = Path(__file__).parents[2]
INT8, FP8 = KvCacheScheme("int8", per_head=True), KvCacheScheme("fp8")
CASES = {
    # Numbers of 11 bits through 3 layers. Windows, query norms and two rotary embeddings; grouped queries.
    ("gemma3", torch.float16, None): 0.01,
    ("llama3", torch.float16, None): 0.03,
    # Of 8 bits, which the interpreter cuts to where a GPU rounds.
    ("mistral", torch.bfloat16, None): 0.1,
    # Keys and values in 8 bits, in the reference too: here and there a number falls to the code beside it,
    # which for e4m3 is up to an eighth away. A scale of another head or layer is off by 0.3 and more.
    ("llama", torch.float16, INT8): 0.08,
    ("llama", torch.float16, FP8): 0.2,
}


def write_case(family: str, dtype: torch.dtype, scheme: KvCacheScheme | None, folder: Path) -> Path:
    """A checkpoint, with scales of a KV cache that differ from layer to layer and head to head."""
    write_family(family, folder, dtype)
    if scheme is not None:
        tensors, limit = load_file(folder / "model.safetensors"), 127 if scheme.kind == "int8" else 448
        for layer in range(3):
            heads = torch.arange(2 if scheme.per_head else 1)
            scales = KvScales((6 + 4 * layer + 3 * heads) / limit, (18 - 4 * layer - 3 * heads) / limit)
            tensors |= KvLayout(scheme).store(f"model.layers.{layer}.self_attn", scales)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        edit_config(folder, quantization_config=compressed_tensors.config({}, ["lm_head"], scheme))
    return folder


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> dict[object, list[float]]:
    """How far each step of each case is from the reference. One process for all, as it starts slowly."""
    root = tmp_path_factory.mktemp("fused")
    folders = [write_case(*case, root / str(number)) for number, case in enumerate(CASES)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.fused_interpreter", *folders],
        stdout=subprocess.PIPE,
        check=True,
        cwd=ROOT,
    )
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(map(str, case)))
def test_prompts_chunks_decoding_and_trees_agree_with_the_reference(
    far: dict[object, list[float]], case: tuple[str, torch.dtype, KvCacheScheme | None]
) -> None:
    assert len(far[case]) == 5
    assert max(far[case]) < CASES[case]


@pytest.mark.parametrize("normalized", [True, False])
def test_experts_sorted_by_their_rows_give_what_each_in_turn_does(normalized: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, logits = (torch.randn(9, size, generator=generator) for size in (8, 6))
    logits[:, 4] = -10.0  # an expert that no row has chosen
    matrices = torch.randn(6, 8, 8, generator=generator)
    experts = [lambda rows, matrix=matrix: F.linear(rows, matrix) for matrix in matrices]
    mixture = Mixture(num_experts=6, num_chosen=2, intermediate_size=8, normalized=normalized)
    wanted = Dense.mixture(None, x, logits, mixture, experts)
    torch.testing.assert_close(Fused.mixture(None, x, logits, mixture, experts), wanted)


def test_a_gpu_that_is_not_there_is_refused(tiny: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match=r"device cuda: torch .* sees no CUDA GPU here; leave --device out"):
        open_engine(tiny, kv_cache_tokens=64, device="cuda")
    for unknown in ("gpu", "mps"):
        with pytest.raises(UsageError, match=rf"device '{unknown}' is unknown; wanted cpu, cuda"):
            open_engine(tiny, kv_cache_tokens=64, device=unknown)


def test_an_engine_of_another_target_has_no_device_to_choose(tiny: Path, tmp_path: Path) -> None:
    compile_engine(tiny, "openvino", tmp_path / "engine")
    with pytest.raises(UsageError, match="an engine for openvino runs where that runs"):
        open_engine(tmp_path / "engine", kv_cache_tokens=64, device="cuda")


def test_a_kv_cache_in_32_bits_is_not_silently_halved(tiny: Path, tmp_path: Path) -> None:
    compile_engine(tiny, "reference", tmp_path / "engine")
    with pytest.raises(
        UsageError, match="a KV cache in f32, on a GPU it has 16 bits; compile it with --kv-cache"
    ):
        open_engine(tmp_path / "engine", kv_cache_tokens=64, device="cuda")
