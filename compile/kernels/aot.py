"""Ahead of time: a kernel as PTX and machine code for a GPU that need not be there."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from qtool.compile.kernels.paged_attention import attend, merge
from qtool.compile.kernels.spec import MERGE_TILE, AttentionSpec, Dtype, Tile, constants, merge_constants
from qtool.errors import QtoolError, UsageError

SHARED_LIMITS = {80: 163, 89: 99, 90: 227, 100: 227}
"""KiB of shared memory that a block of threads may have, by compute capability."""

POINTERS = {"float16": "*fp16", "bfloat16": "*bf16", "int8": "*i8", "float8_e4m3": "*fp8e4nv"}
Constants = Mapping[str, int | float | bool | None]


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel for one compute capability.

    Its parameters are the Triton source's pointers and 32-bit integers in their order, and nothing else;
    pointers are to be multiples of 16.
    """

    name: str
    ptx: str
    cubin: bytes
    num_warps: int
    shared: int
    """Bytes of dynamic shared memory to launch it with."""
    registers: int
    """Of one thread."""
    spilled: int
    """Bytes that one thread keeps in local memory for want of registers."""

    @property
    def threads(self) -> int:
        """Of one program."""
        return self.num_warps * 32


def compile_ahead(spec: AttentionSpec, cc: int, tile: Tile) -> CompiledKernel:
    """`attend` for compute capability `cc`, such as 90; `grid` of spec.py says how many programs to launch.

    Raises UsageError for a capability that is not in SHARED_LIMITS, QtoolError if the kernel does not fit it.
    """
    io, pool = POINTERS[spec.dtype], _pool_pointer(spec, cc)
    arguments = {
        **dict.fromkeys(("queries", "new_keys", "new_values"), io),
        **dict.fromkeys(("key_pool", "value_pool"), pool),
        **dict.fromkeys(("block_tables", "past_lens", "new_starts", "positions"), "*i32"),
        "tree": "*i1",
        **dict.fromkeys(("key_scales", "value_scales"), "*fp32"),
        **dict.fromkeys(("num_tokens", "num_sequences", "max_blocks", "tree_width"), "i32"),
    }
    fixed: Constants = constants(spec, tile)
    if spec.split:
        outputs = {"output": "*fp32", "lse": "*fp32"}
    else:
        outputs, fixed = {"output": io}, {"lse": None, **fixed}
    return _compile(attend, arguments | outputs, fixed, cc, tile)


def compile_merge(head_dim: int, dtype: Dtype, cc: int) -> CompiledKernel:
    """`merge` for the partial results of `attend`; launch one program a row of the output, T * H in all."""
    arguments = {
        "parts": "*fp32",
        "lse": "*fp32",
        "queries": POINTERS[dtype],
        "block_tables": "*i32",
        "num_rows": "i32",
        "num_splits": "i32",
        "output": POINTERS[dtype],
    }
    return _compile(merge, arguments, merge_constants(head_dim), cc, MERGE_TILE)


def _pool_pointer(spec: AttentionSpec, cc: int) -> str:
    # Triton has no e4m3 below sm_89; the kernel takes its bytes apart by itself.
    return "*u8" if spec.pool_dtype == "float8_e4m3" and cc < 89 else POINTERS[spec.pool_dtype]


def _compile(kernel: Any, arguments: dict[str, str], fixed: Constants, cc: int, tile: Tile) -> CompiledKernel:
    if cc not in SHARED_LIMITS:
        known = ", ".join(str(known) for known in SHARED_LIMITS)
        raise UsageError(f"paged attention: no kernel for compute capability {cc}; known: {known}")
    signature = {name: arguments.get(name, "constexpr") for name in kernel.arg_names}
    # TensorRT and torch align every tensor to more than 16 bytes, which lets rows be read in 16-byte pieces.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # it names folders of this machine
        built = triton.compile(
            ASTSource(kernel, signature, constexprs=dict(fixed), attrs=aligned),
            target=GPUTarget("cuda", cc, 32),
            options={"num_warps": tile.num_warps, "num_stages": tile.num_stages},
        )
    metadata = built.metadata
    if metadata.shared > SHARED_LIMITS[cc] * 1024:
        raise QtoolError(
            f"paged attention: a tile of {tile.rows} rows and {tile.keys} keys takes {metadata.shared} bytes "
            f"of shared memory; sm_{cc} has {SHARED_LIMITS[cc]} KiB; take a smaller tile"
        )
    ptx = _without_scratch(built.asm["ptx"], metadata.name, len(arguments))
    cubin, registers, spilled = _assemble(ptx, cc)
    return CompiledKernel(metadata.name, ptx, cubin, metadata.num_warps, metadata.shared, registers, spilled)


def _without_scratch(ptx: str, name: str, wanted: int) -> str:
    """The PTX without the scratch memory pointers that Triton puts after the `wanted` parameters.

    Only Triton's own launcher passes them. For any other the driver would read past the end of the argument
    list, so they go, unless the kernel uses them.
    """
    entry = re.search(rf"\.entry {name}\(\n(.*?)\n\)", ptx, re.DOTALL)
    if entry is None:
        raise QtoolError(f"Triton's PTX has no entry {name}; this version of Triton writes it in another way")
    parameters = entry[1].split(",\n")
    for extra in parameters[wanted:]:
        symbol = extra.split()[-1]
        if f"[{symbol}" in ptx:
            raise QtoolError(
                f"kernel {name} uses Triton's scratch memory ({symbol}), which only Triton provides"
            )
    return ptx.replace(entry[1], ",\n".join(parameters[:wanted]))


def _assemble(ptx: str, cc: int) -> tuple[bytes, int, int]:
    """Machine code from PTX by the ptxas of Triton's wheel, a thread's registers and its spilled bytes."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [
            get_ptxas(cc).path,
            "-v",
            f"--gpu-name={sm_arch_from_capability(cc)}",
            source,
            "-o",
            target,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise QtoolError(f"ptxas refuses the kernel for sm_{cc}: {done.stderr.strip()}")
        registers = re.search(r"Used (\d+) registers", done.stderr)
        stored = re.search(r"(\d+) bytes spill stores", done.stderr)
        if registers is None or stored is None:
            raise QtoolError(f"ptxas reports no register use: {done.stderr.strip()}")
        return target.read_bytes(), int(registers[1]), int(stored[1])
