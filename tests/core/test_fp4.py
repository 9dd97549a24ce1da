"""fp4 numbers, their rounding and their packing are those of compressed-tensors, to the bit."""

import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationStatus, forward_quantize
from compressed_tensors.quantization.quant_scheme import NVFP4
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4

from qtool.core.activation import Activation
from qtool.core.fp4 import FP4_VALUES, fp4_codes, fp4_values, pack_fp4, unpack_fp4
from qtool.core.qtensor import Fp4Tensor
from qtool.core.schemes import NVFP4_ACTIVATIONS, Fp4Scheme

TIES = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])


def test_the_nearest_number_is_taken_and_the_even_code_in_the_middle() -> None:
    near = torch.cat(
        [torch.linspace(0, 7, 1401), TIES, TIES.nextafter(torch.zeros(7)), TIES.nextafter(TIES * 2)]
    )
    x = torch.cat([near, -near])
    x = x.clamp(-6, 6)  # compressed-tensors clamps before it rounds
    assert torch.equal(fp4_values(fp4_codes(x)), cast_to_fp4(x.clone()))
    assert fp4_codes(TIES).tolist() == [0, 2, 2, 4, 4, 6, 6]


def test_what_is_too_large_becomes_the_largest_and_what_is_small_keeps_its_sign() -> None:
    assert fp4_codes(torch.tensor([1e30, -1e30, torch.inf, 1e-30, -1e-30])).tolist() == [7, 15, 7, 0, 8]


def test_every_code_is_its_own_number() -> None:
    assert fp4_values(torch.arange(8)).tolist() == list(FP4_VALUES)
    assert torch.equal(fp4_values(torch.arange(8, 16)), -fp4_values(torch.arange(8)))


def test_two_codes_make_a_byte_the_first_in_its_low_bits() -> None:
    codes = torch.randint(0, 16, (5, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(pack_fp4(codes), pack_fp4_to_uint8(fp4_values(codes)))
    assert torch.equal(unpack_fp4(pack_fp4(codes)), codes)
    assert torch.equal(unpack_fp4_from_uint8(pack_fp4(codes), 5, 6, torch.float32), fp4_values(codes))


def test_rows_of_an_fp4_weight_can_be_cut_and_stacked() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (5, 48), dtype=torch.uint8, generator=generator)
    scale = (torch.rand(5, 3, generator=generator) * 100 + 1).to(torch.float8_e4m3fn)
    weight = Fp4Tensor(codes, scale, torch.tensor([0.3], dtype=torch.float64), Fp4Scheme("nvfp4"))
    assert weight.shape == (5, 48)
    assert torch.equal(weight.rows(slice(1, 3)).dequantize(), weight.dequantize()[1:3])
    stacked = Fp4Tensor(
        torch.cat([codes, codes]),
        torch.cat([scale, scale]),
        torch.tensor([0.3] * 5 + [0.5] * 5, dtype=torch.float64),
        weight.scheme,
    )
    assert torch.equal(stacked.rows(slice(0, 5)).dequantize(), weight.dequantize())
    assert not torch.equal(stacked.rows(slice(5, 10)).dequantize(), weight.dequantize())


def test_nvfp4_activations_are_rounded_as_compressed_tensors_does() -> None:
    x = torch.randn(33, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 33)[:, None]
    x[5] = 0
    stored = torch.tensor([448 * 6 / float(x.abs().max())])
    module = torch.nn.Linear(96, 1)
    module.quantization_status = QuantizationStatus.COMPRESSED
    module.input_global_scale = torch.nn.Parameter(stored)
    with torch.no_grad():
        wanted = forward_quantize(
            module, x[None], "input", QuantizationArgs(**dict(NVFP4["input_activations"]))
        )
    found = Activation(NVFP4_ACTIVATIONS, 1 / stored.item()).fake_quantize(x)
    assert torch.equal(found, wanted[0])
