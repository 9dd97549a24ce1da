"""The GPTQ layout of AutoGPTQ and GPTQModel: codes of 2, 3, 4 or 8 bits, packed along the inputs.

A linear ``m`` is ``m.qweight`` [K * bits / 32, N] int32, ``m.qzeros`` [G, N * bits / 32] int32, ``m.scales``
[G, N] and mostly ``m.g_idx`` [K] int32, the group of each input. Codes and zero points are unsigned. Version
1 of the format stores zero points less one, in the bits that they have: 0 as the largest code.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from qtool.core.formats.input_order import read_order
from qtool.core.formats.parts import Parts
from qtool.core.formats.promises import refuse_dynamic, refuse_exempt, refuse_unknown
from qtool.core.formats.tensors import StoredModel
from qtool.core.formats.words import unpack_from_int32
from qtool.core.qtensor import Linear, QuantizedTensor
from qtool.core.schemes import IntScheme, LinearScheme
from qtool.errors import QtoolError

ADDED = {"gptq": 1, "gptq_v2": 0}
"""What is added to the stored zero points of each version."""
NUM_BITS = (2, 3, 4, 8)
_READ = ("quant_method", "bits", "group_size", "sym", "checkpoint_format", "format", "dynamic", "lm_head")
_EXEMPT, _PACKING = ("modules_to_not_convert",), ("is_marlin_format", "pack_dtype")
_PROVENANCE = (
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "desc_act",  # g_idx tells the order of inputs
    "exllama_config",
    "gc_mode",
    "hessian",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "mse",
    "offload_to_disk",
    "offload_to_disk_path",
    "pad_token_id",
    "quantizer",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
    "vram_strategy",
)
"""How the codes were chosen, or are to be run."""


class GptqFormat:
    """Reads GPTQ checkpoints, with and without activation order."""

    kv_cache = None

    def __init__(self, checkpoint: StoredModel) -> None:
        self._checkpoint = checkpoint
        config = checkpoint.config["quantization_config"]
        where = f"{checkpoint.path / 'config.json'}: quantization_config"
        refuse_unknown(config, (*_READ, *_EXEMPT, *_PACKING, *_PROVENANCE), where)
        named = config.get("format")
        version = config.get("checkpoint_format") or named or "gptq"
        if version not in ADDED:
            raise QtoolError(
                f"{where}.checkpoint_format is {version!r}, which is not supported; wanted {', '.join(ADDED)}"
            )
        if named not in (None, version):
            raise QtoolError(f"{where}.format is {named!r}, but checkpoint_format {version!r}")
        if config.get("is_marlin_format") or config.get("pack_dtype", "int32") != "int32":
            raise QtoolError(f"{where} describes another packing than GPTQ's own, which is not supported")
        refuse_dynamic(checkpoint, config.get("dynamic"), where)
        exempt = config.get("modules_to_not_convert") or ()
        refuse_exempt(checkpoint, exempt, f"{where}.modules_to_not_convert")
        if config.get("lm_head") and "lm_head.weight" in checkpoint:
            raise QtoolError(f"{where}.lm_head is true, but lm_head is stored as it was, not quantized")
        bits, group_size = config.get("bits"), config.get("group_size", 128)
        if bits not in NUM_BITS:
            raise QtoolError(f"{where}.bits is {bits!r}, wanted 2, 3, 4 or 8")
        if not isinstance(group_size, int) or (group_size < 1 and group_size != -1):
            raise QtoolError(f"{where}.group_size is {group_size!r}, wanted a positive number or -1")
        self._added = ADDED[version]
        self._scheme = IntScheme(
            bits, None if group_size == -1 else group_size, symmetric=bool(config.get("sym", True))
        )

    def quantizes(self, module: str) -> bool:
        """Whether any packed part of `module` is stored."""
        parts = Parts(self._checkpoint, module)
        return any(name in parts for name in self.parts(module))

    def scheme(self, module: str) -> LinearScheme:
        """The config's; where groups do not divide the inputs, with parts of groups that do."""
        rows, _ = Parts(self._checkpoint, module).shape("qweight")
        return LinearScheme(self._scheme_for(rows * 32 // self._scheme.num_bits))

    def shape(self, module: str) -> tuple[int, int]:
        """From the packed codes' own."""
        rows, out_features = Parts(self._checkpoint, module).shape("qweight")
        return out_features, rows * 32 // self._scheme.num_bits

    def parts(self, module: str) -> tuple[str, ...]:
        """The same for all."""
        return "qweight", "qzeros", "scales", "g_idx"

    def read(self, module: str) -> Linear:
        """Unpack one linear, its groups made contiguous by the order of its inputs."""
        parts, bits = Parts(self._checkpoint, module), self._scheme.num_bits
        rows, out_features = parts.shape("qweight")
        if rows * 32 % bits or out_features * bits % 32:
            raise parts.error(
                "qweight", f"has shape {(rows, out_features)}, no whole words of {bits}-bit codes"
            )
        in_features = rows * 32 // bits
        size = self._scheme.group_size or in_features
        groups = -(-in_features // size)
        scale = parts.scale("scales", (groups, out_features)).T
        zero_point = self._zero_point(parts, groups, out_features)
        order = read_order(parts, "g_idx", in_features, size) if "g_idx" in parts else None
        packed = parts.read("qweight", torch.int32, (rows, out_features))
        codes = unpack_from_int32(packed, bits, torch.Size((in_features, out_features)), packed_dim=0).T
        if order is not None:
            codes = codes[:, order]
        scheme = self._scheme_for(in_features)
        repeats, num_parts = size // (scheme.group_size or size), scheme.num_groups(in_features)
        if zero_point is not None:
            zero_point = zero_point.repeat_interleave(repeats, 1)[:, :num_parts].contiguous()
        scale = scale.repeat_interleave(repeats, 1)[:, :num_parts].contiguous()
        return Linear(QuantizedTensor(codes.contiguous(), scale, zero_point, scheme), None, order)

    def _scheme_for(self, in_features: int) -> IntScheme:
        """The last group may be short: all are split then, into parts of one size with the same scale."""
        size = self._scheme.group_size
        return self._scheme if size is None else replace(self._scheme, group_size=math.gcd(size, in_features))

    def _zero_point(self, parts: Parts, groups: int, out_features: int) -> Tensor | None:
        """Zero points [N, G] as signed codes; None when symmetric."""
        bits, low = self._scheme.num_bits, self._scheme.low
        words = parts.read("qzeros", torch.int32, (groups, out_features * bits // 32))
        codes: Tensor = unpack_from_int32(words, bits, torch.Size((groups, out_features)))
        stored = codes.T.short() - low
        zero_point = (stored + self._added).remainder(1 << bits) + low
        if not self._scheme.symmetric:
            return zero_point.to(torch.int8)
        if bool(zero_point.any()):
            raise parts.error(
                "qzeros",
                "has other zero points than sym: true means; is checkpoint_format in config.json right?",
            )
        return None
