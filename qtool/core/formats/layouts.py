"""compressed-tensors' layouts: how the codes and scales of one linear lie in tensors."""

from dataclasses import replace

import torch
from torch import Tensor

from qtool.core.activation import Activation
from qtool.core.formats.input_order import read_order
from qtool.core.formats.parts import Parts
from qtool.core.formats.words import pack_to_int32, unpack_from_int32
from qtool.core.fp4 import pack_fp4, unpack_fp4
from qtool.core.qtensor import Fp4Tensor, Fp8Tensor, Linear, QuantizedTensor
from qtool.core.schemes import ActivationScheme, Fp4Scheme, Fp8Scheme, IntScheme, LinearScheme

PACKED = "pack-quantized"
PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
"""Names of one layout: codes in int8 or float8, each in an element of its own."""
FP4 = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized"}

_ONE = ((1,), ())
"""The shapes of a single number."""


def layout_of(scheme: LinearScheme) -> str:
    """The layout to write a linear of `scheme` in, as compressed-tensors itself chooses."""
    weight = scheme.weight
    if isinstance(weight, Fp4Scheme):
        return FP4[weight.kind]
    if isinstance(weight, Fp8Scheme):
        return "naive-quantized" if scheme.activation is None else "float-quantized"
    return PACKED if scheme.activation is None else "int-quantized"


def store(linear: Linear, layout: str) -> dict[str, Tensor]:
    """The tensors that hold a quantized linear, by their own names; `order` has to be None."""
    weight, activation = linear.weight, linear.activation
    assert not isinstance(weight, Tensor)
    if isinstance(weight, Fp4Tensor):
        tensors = _store_fp4(weight)
    elif isinstance(weight, Fp8Tensor):
        scale = weight.scale.reshape(1) if weight.scheme.rows is None else weight.scale
        tensors = {"weight": weight.codes, "weight_scale": scale}
    elif layout == PACKED:
        tensors = _store_packed(weight)
    else:
        tensors = {"weight": weight.codes, "weight_scale": weight.scale}
        if weight.zero_point is not None:
            tensors["weight_zero_point"] = weight.zero_point
    if activation is not None and activation.scale is not None:
        tensors |= _store_activation(activation, activation.scale)
    return tensors


def _store_packed(weight: QuantizedTensor) -> dict[str, Tensor]:
    bits = weight.scheme.num_bits
    tensors = {
        "weight_packed": pack_to_int32(weight.codes, bits),
        "weight_scale": weight.scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.zero_point is not None:
        tensors["weight_zero_point"] = pack_to_int32(weight.zero_point, bits, packed_dim=0)
    return tensors


def _store_fp4(weight: Fp4Tensor) -> dict[str, Tensor]:
    packed = {"weight_packed": pack_fp4(weight.codes)}
    if weight.global_scale is None:
        return {**packed, "weight_scale": weight.scale.view(torch.uint8)}
    return {
        **packed,
        "weight_scale": weight.scale,
        "weight_global_scale": (1 / weight.global_scale).float(),
    }


def _store_activation(activation: Activation, scale: float) -> dict[str, Tensor]:
    if activation.scheme.kind == "nvfp4":
        return {"input_global_scale": torch.tensor([1 / scale], dtype=torch.float32)}
    tensors = {"input_scale": torch.tensor([scale], dtype=torch.float32)}
    if not activation.scheme.symmetric:
        tensors["input_zero_point"] = torch.tensor([activation.zero_point], dtype=torch.int8)
    return tensors


def load(parts: Parts, scheme: LinearScheme, layout: str, reordered: bool = False) -> Linear:
    """The linear that `parts` hold; `reordered`: a stored ``weight_g_idx`` says which inputs a group has."""
    weight, inputs = scheme.weight, scheme.activation
    activation = None if inputs is None else _load_activation(parts, inputs)
    if isinstance(weight, Fp4Scheme):
        return Linear(_load_fp4(parts, weight), None, activation=activation)
    if isinstance(weight, Fp8Scheme):
        return Linear(load_fp8(parts, weight, "weight_scale"), None, activation=activation)
    codes = _load_packed(parts, weight) if layout == PACKED else _load_int8(parts, weight)
    order = None
    if reordered and weight.group_size is not None:
        order = read_order(parts, "weight_g_idx", codes.shape[1], weight.group_size)
    if order is not None:
        codes = replace(codes, codes=codes.codes[:, order].contiguous())
    return Linear(codes, None, order, activation)


def parts_of(scheme: LinearScheme, layout: str, reordered: bool) -> tuple[str, ...]:
    """The names of what `load` reads of a linear."""
    weight, inputs = scheme.weight, scheme.activation
    packed = layout == PACKED or layout in FP4.values()
    names = ["weight_packed" if packed else "weight", "weight_scale"]
    if layout == PACKED:
        names.append("weight_shape")
    if isinstance(weight, IntScheme) and not weight.symmetric:
        names.append("weight_zero_point")
    if reordered:
        names.append("weight_g_idx")
    if weight == Fp4Scheme("nvfp4"):
        names.append("weight_global_scale")
    if inputs is not None and inputs.kind == "nvfp4":
        names.append("input_global_scale")
    elif inputs is not None and not inputs.dynamic:
        names += ["input_scale"] if inputs.symmetric else ["input_scale", "input_zero_point"]
    return tuple(names)


def shape_of(parts: Parts, layout: str) -> tuple[int, int]:
    """(N, K) of the linear that `parts` hold, without reading its codes."""
    if layout == PACKED:
        out_features, in_features = parts.read("weight_shape", torch.int64, (2,)).tolist()
        return out_features, in_features
    if layout in FP4.values():
        out_features, size = parts.shape("weight_packed")
        return out_features, size * 2
    return parts.shape("weight")


def _load_packed(parts: Parts, scheme: IntScheme) -> QuantizedTensor:
    bits = scheme.num_bits
    out_features, in_features = (int(size) for size in parts.read("weight_shape", torch.int64, (2,)))
    groups = scheme.num_groups(in_features)
    if groups * (scheme.group_size or in_features) != in_features:
        raise parts.error("weight_shape", f"gives {in_features} inputs, which {scheme} does not divide")
    scale = parts.scale("weight_scale", (out_features, groups))
    words = parts.read("weight_packed", torch.int32, (out_features, -(-in_features * bits // 32)))
    codes = unpack_from_int32(words, bits, torch.Size((out_features, in_features))).contiguous()
    if scheme.symmetric:
        return QuantizedTensor(codes, scale, None, scheme)
    words = parts.read("weight_zero_point", torch.int32, (-(-out_features * bits // 32), groups))
    zero_point = unpack_from_int32(words, bits, scale.shape, packed_dim=0)
    return QuantizedTensor(codes, scale, zero_point, scheme)


def _load_int8(parts: Parts, scheme: IntScheme) -> QuantizedTensor:
    out_features, in_features = parts.shape("weight")
    if scheme.group_size is not None and in_features % scheme.group_size:
        raise parts.error("weight", f"has {in_features} inputs, which its scheme, {scheme}, does not divide")
    codes = parts.read("weight", torch.int8, (out_features, in_features))
    if int(codes.min()) < scheme.low or int(codes.max()) > scheme.high:
        raise parts.error("weight", f"has codes outside of {scheme.low} to {scheme.high}")
    shape = (out_features, scheme.num_groups(in_features))
    scale = parts.scale("weight_scale", shape, *_ONE).expand(shape).contiguous()
    if scheme.symmetric:
        return QuantizedTensor(codes, scale, None, scheme)
    zero_point = parts.read("weight_zero_point", torch.int8, shape, *_ONE)
    return QuantizedTensor(codes, scale, zero_point.expand(shape).contiguous(), scheme)


def load_fp8(parts: Parts, scheme: Fp8Scheme, scale: str) -> Fp8Tensor:
    """Float8 codes as they are, with the scales that lie beside them as `scale`."""
    shape = parts.shape("weight")
    codes = parts.read("weight", torch.float8_e4m3fn, shape)
    if not bool(codes.float().isfinite().all()):
        raise parts.error("weight", "has codes that are no numbers; the checkpoint is damaged")
    grid = scheme.grid(*shape)
    shapes = [grid, *(_ONE if grid == (1, 1) else ()), *([(shape[0],)] if grid == (shape[0], 1) else [])]
    return Fp8Tensor(codes, parts.scale(scale, *shapes).reshape(grid), scheme)


def _load_fp4(parts: Parts, scheme: Fp4Scheme) -> Fp4Tensor:
    if scheme.kind == "nvfp4":
        factor = 1 / parts.scale("weight_global_scale", *_ONE).double().reshape(1)
        return load_nvfp4(parts, "weight_packed", factor)
    packed, grid = _fp4_bytes(parts, "weight_packed", scheme)
    exponents = parts.read("weight_scale", torch.uint8, grid)
    if bool((exponents == 255).any()):
        raise parts.error("weight_scale", "has exponents that are no numbers; the checkpoint is damaged")
    return Fp4Tensor(unpack_fp4(packed), exponents.view(torch.float8_e8m0fnu), None, scheme)


def load_nvfp4(parts: Parts, name: str, global_scale: Tensor) -> Fp4Tensor:
    """nvfp4 codes packed as `name`, beside the float8 scales of their blocks."""
    scheme = Fp4Scheme("nvfp4")
    packed, grid = _fp4_bytes(parts, name, scheme)
    scale = parts.read("weight_scale", torch.float8_e4m3fn, grid)
    # a block of zeros may have any scale, zero among them
    if not bool(scale.float().isfinite().all()) or not bool((scale.float() != 0).any()):
        raise parts.error("weight_scale", "is all zero or has values that are no numbers")
    return Fp4Tensor(unpack_fp4(packed), scale, global_scale, scheme)


def _fp4_bytes(parts: Parts, name: str, scheme: Fp4Scheme) -> tuple[Tensor, tuple[int, int]]:
    """Two codes a byte [N, K / 2], and the shape of their blocks' scales."""
    out_features, size = parts.shape(name)
    if size * 2 % scheme.group_size:
        raise parts.error(name, f"has {size * 2} inputs, which blocks of {scheme.group_size} do not divide")
    grid = (out_features, size * 2 // scheme.group_size)
    return parts.read(name, torch.uint8, (out_features, size)), grid


def _load_activation(parts: Parts, scheme: ActivationScheme) -> Activation:
    if scheme.kind == "nvfp4":
        return Activation(scheme, 1 / parts.scale("input_global_scale", *_ONE).item())
    if scheme.dynamic:
        return Activation(scheme)
    scale = parts.scale("input_scale", *_ONE).item()
    if scheme.symmetric:
        return Activation(scheme, scale)
    return Activation(scheme, scale, int(parts.read("input_zero_point", torch.int8, *_ONE).item()))
