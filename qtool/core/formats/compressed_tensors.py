"""compressed-tensors' formats: integer codes packed into words, fp4 codes two a byte, others as they are.

Packed, a linear ``m`` becomes ``m.weight_packed`` [N, ceil(K*bits/32)] int32, ``m.weight_scale`` [N, G],
``m.weight_shape`` [2] and, when asymmetric, ``m.weight_zero_point`` packed along N. fp4 codes are
``m.weight_packed`` [N, K/2] uint8 with ``m.weight_scale`` [N, G] and, for nvfp4, ``m.weight_global_scale``
[1], by which scales are divided. Otherwise it is ``m.weight`` [N, K] with ``m.weight_scale`` and, when
asymmetric, ``m.weight_zero_point`` [N, G]. Static activations add ``m.input_scale`` and
``m.input_zero_point``, those of nvfp4 ``m.input_global_scale``; a quantized KV cache ``k_scale`` and
``v_scale`` of each attention.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from qtool.core.activation import Activation
from qtool.core.formats.config_groups import Group, read_groups
from qtool.core.formats.config_writing import write_groups
from qtool.core.formats.contract import Contents
from qtool.core.formats.kv_cache import KvLayout
from qtool.core.formats.layouts import layout_of, load, parts_of, shape_of, store
from qtool.core.formats.parts import Parts
from qtool.core.formats.tensors import StoredModel
from qtool.core.qtensor import KvScales, Linear, Quantized
from qtool.core.schemes import Fp4Scheme, Fp8Scheme, IntScheme, KvCacheScheme, LinearScheme, WeightScheme
from qtool.errors import QtoolError, UsageError


class CompressedTensors:
    """Reads checkpoints that compressed-tensors, llm-compressor and qtool write."""

    def __init__(self, checkpoint: StoredModel) -> None:
        self._checkpoint = checkpoint
        self._where = str(checkpoint.path / "config.json")
        self._groups = read_groups(checkpoint.config["quantization_config"], self._where)
        scheme = self._groups.kv_cache
        self.kv_cache = None if scheme is None else KvLayout(scheme)

    def quantizes(self, module: str) -> bool:
        """Whether a config group targets `module`."""
        return self._groups.find(module) is not None

    def scheme(self, module: str) -> LinearScheme:
        """The scheme of the config group that targets `module`."""
        return self._group(module).scheme

    def shape(self, module: str) -> tuple[int, int]:
        """As stored, or from what lies beside the packed codes."""
        return shape_of(Parts(self._checkpoint, module), self._group(module).layout)

    def parts(self, module: str) -> tuple[str, ...]:
        """Those of the config group's layout and scheme."""
        group = self._group(module)
        return parts_of(group.scheme, group.layout, group.reordered)

    def read(self, module: str) -> Linear:
        """Read one linear; QtoolError names the tensor that is missing or damaged."""
        group = self._group(module)
        return load(Parts(self._checkpoint, module), group.scheme, group.layout, group.reordered)

    def _group(self, module: str) -> Group:
        group = self._groups.find(module)
        if group is None:
            raise QtoolError(f"{self._where}: no config group targets {module}")
        return group


class CompressedTensorsWriter:
    """Writes every scheme, each linear in the layout that compressed-tensors would choose."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents

    def encode(self, module: str, linear: Linear) -> dict[str, Tensor]:
        """Raises UsageError for inputs in an order of their own, which compressed-tensors 0.20 dropped."""
        if linear.order is not None:
            raise UsageError(
                f"{module}: has groups of inputs from anywhere (g_idx), which compressed-tensors does not "
                "load any more; write it as gptq"
            )
        assert not isinstance(linear.weight, Tensor)
        return encode(module, linear.weight, linear.activation)

    def encode_kv(self, attention: str, scales: KvScales) -> dict[str, Tensor]:
        """Beside the attention's own parts."""
        assert self._contents.kv_cache is not None
        return KvLayout(self._contents.kv_cache).store(attention, scales)

    def config(self) -> dict[str, Any]:
        """A config group for each scheme."""
        return config(self._contents.schemes, self._contents.dense, self._contents.kv_cache)

    def files(self) -> dict[str, dict[str, Any]]:
        """None."""
        return {}


@dataclass(frozen=True)
class _Tensors:
    """What `encode` made, got by full name."""

    get: Callable[[str], Tensor]
    path = Path()

    def __contains__(self, name: str) -> bool:
        return True

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.get(name).shape)

    def tensor(self, name: str) -> Tensor:
        return self.get(name)


def decode(module: str, scheme: LinearScheme, tensor: Callable[[str], Tensor]) -> Linear:
    """The linear `module` from its stored tensors, got by full name; the inverse of `encode`.

    Raises QtoolError for tensors of the wrong shape or dtype, and for scales that are zero or not finite.
    """
    return load(Parts(_Tensors(tensor), module), scheme, layout_of(scheme))


def encode(module: str, weight: Quantized, activation: Activation | None = None) -> dict[str, Tensor]:
    """The tensors that store `weight` as the linear `module`, whose inputs are rounded by `activation`."""
    scheme = LinearScheme(weight.scheme, None if activation is None else activation.scheme)
    tensors = store(Linear(weight, None, activation=activation), layout_of(scheme))
    return {f"{module}.{name}": tensor.contiguous() for name, tensor in tensors.items()}


def config(
    schemes: Mapping[str, LinearScheme], dense: Sequence[str], kv_cache: KvCacheScheme | None = None
) -> dict[str, Any]:
    """``quantization_config`` for a checkpoint.

    `schemes` gives each quantized linear its scheme; `dense` lists every linear that stays in full
    precision. ``dequantize`` makes transformers unpack weights while it loads them instead of before the
    first forward pass; other engines pass over it.
    """
    written = write_groups(schemes, dense, kv_cache)
    unpacks = len(set(schemes.values())) == 1 and _only_unpacked(next(iter(schemes.values())))
    return written | ({"dequantize": True} if unpacks else {})


def _only_unpacked(scheme: LinearScheme) -> bool:
    """Whether transformers loads linears of `scheme` only where it unpacks them, into numbers of any dtype.

    compressed-tensors 0.20 makes it no room for packed zero points, and unpacks fp4 into bfloat16 later.
    """
    weight = scheme.weight
    packed = not weight.symmetric if isinstance(weight, IntScheme) else isinstance(weight, Fp4Scheme)
    return packed and scheme.activation is None


def transformers_loads(schemes: Collection[IntScheme]) -> bool:
    """Whether transformers (as of 5.24) loads linears of these schemes from one checkpoint.

    It does unless some have zero points and some another scheme: zero points need `config` to ask that it
    unpacks, and then it takes the first group's scheme for every linear.
    """
    return len(set(schemes)) == 1 or all(scheme.symmetric for scheme in schemes)


def transformers_loads_experts(schemes: Collection[LinearScheme]) -> bool:
    """Whether transformers (as of 5.24) makes of quantized experts what they are.

    It unpacks them into one tensor by one scheme: symmetric integers, and fp8 with a scale a channel or a
    tensor, whose inputs it leaves as they are. Of others it makes an error or, of nvfp4, wrong numbers.
    """
    if len(set(schemes)) > 1:
        return False
    weights, activations = {one.weight for one in schemes}, {one.activation for one in schemes}
    return activations <= {None} and all(
        weight.symmetric if isinstance(weight, IntScheme) else _by_channel(weight) for weight in weights
    )


def _by_channel(weight: WeightScheme) -> bool:
    return isinstance(weight, Fp8Scheme) and weight.columns is None
