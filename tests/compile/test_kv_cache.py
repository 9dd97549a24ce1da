"""Checkpoints with a quantized KV cache: the reference rounds as compressed-tensors does, others refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from qtool.compile.build import compile_engine
from qtool.core.schemes import KvCacheScheme
from qtool.errors import UsageError
from qtool.runtime.engines import open_engine
from tests.compile.steps import difference, in_chunks
from tests.compile.test_reference import TOKENS
from tests.core.quantized import kv_scales, write_scheme

SCHEMES = [KvCacheScheme(kind, per_head) for kind in ("int8", "fp8") for per_head in (False, True)]


class RoundedCache(DynamicCache):
    """transformers' cache, what goes into it rounded by compressed-tensors.

    compressed-tensors 0.20 has a hook for that, which looks for a name that transformers 5.24 gave up.
    """

    def __init__(self, scheme: KvCacheScheme) -> None:
        super().__init__()
        self.args = QuantizationArgs(
            num_bits=8, type="int" if scheme.kind == "int8" else "float", strategy="tensor"
        )

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *rest: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        scales, zero = kv_scales(layer), torch.zeros(1)
        keys = fake_quantize(keys, scales.key, zero, self.args)
        return super().update(
            keys, fake_quantize(values, scales.value, zero, self.args), layer, *rest, **named
        )


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_reference_rounds_keys_and_values_as_others_do(
    scheme: KvCacheScheme, tiny: Path, tmp_path: Path
) -> None:
    write_scheme(tiny, tmp_path / "model", {}, kv_cache=scheme)
    found, exact = (
        in_chunks(open_engine(folder, kv_cache_tokens=320, threads=1), TOKENS, [4, 9, 1], [40, 37])
        for folder in (tmp_path / "model", tiny)
    )
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS]), cache=RoundedCache(scheme)).logits[0].numpy()
    distance = difference(exact, wanted)
    assert distance > 0.01  # the scales are too narrow for many keys
    # a sum in another order may move a number to the next code, and that spreads
    assert difference(found, wanted) < 0.2 * distance


def test_a_target_that_keeps_another_cache_has_to_be_told_so(tiny: Path, tmp_path: Path) -> None:
    write_scheme(tiny, tmp_path / "model", {}, kv_cache=SCHEMES[0])
    with pytest.raises(
        UsageError, match="asks for an int8 KV cache, a scale a layer, which target reference does"
    ):
        compile_engine(tmp_path / "model", "reference", tmp_path / "engine")
    assert (
        compile_engine(tmp_path / "model", "reference", tmp_path / "engine", kv_cache="f32").kv_cache == "f32"
    )
