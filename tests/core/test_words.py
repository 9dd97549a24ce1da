"""Packed words are those of compressed-tensors, bit for bit."""

import subprocess
import sys

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import helpers

from qtool.core.formats.words import pack_to_int32, unpack_from_int32


@pytest.mark.parametrize("packed_dim", [0, 1])
@pytest.mark.parametrize("num_bits", range(1, 9))
@pytest.mark.parametrize("shape", [(3, 5), (1, 64), (7, 33), (40, 1)], ids=str)
def test_words_are_those_of_compressed_tensors(
    num_bits: int, packed_dim: int, shape: tuple[int, int]
) -> None:
    half = 1 << (num_bits - 1)
    generator = torch.Generator().manual_seed(num_bits)
    codes = torch.randint(-half, half, shape, generator=generator).to(torch.int8)
    words = pack_to_int32(codes, num_bits, packed_dim)
    assert torch.equal(words, helpers.pack_to_int32(codes, num_bits, packed_dim))
    found = unpack_from_int32(words, num_bits, codes.shape, packed_dim)
    assert found.dtype == torch.int8
    assert torch.equal(found, codes)


def test_opening_a_quantized_checkpoint_imports_no_library_of_models() -> None:
    script = "import sys, qtool.core.checkpoint, qtool.core.formats.compressed_tensors\n"
    script += "import qtool.core.formats.gptq, qtool.core.formats.autoawq\n"
    script += "sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
