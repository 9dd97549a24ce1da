"""Compile a draft head: an engine of one layer, with the head's own vocabulary, that gets features too."""

from collections.abc import Callable
from pathlib import Path

from qtool.compile.engine import EngineSpec, own_files
from qtool.compile.heads.head import TOKENS, Head
from qtool.compile.hidden import FINAL, HiddenStates
from qtool.core.lazy import load
from qtool.core.manifest import versions
from qtool.core.recipe import OpenVinoOptions

LOWERED = {"openvino": "qtool.compile.heads.openvino:write_draft"}
"""Targets that EAGLE's layer is lowered to; beside engines of others it runs in torch."""
_KEPT = (TOKENS, "fc.weight", "fc.bias")
"""Of a lowered EAGLE-3: what maps tokens and fuses the target's hidden states, outside of the graph."""


def write_head(
    head: Head, target: str, folder: Path, *, block_size: int, kv_bytes: Callable[[int], int]
) -> None:
    """Write a head for an engine of `target` into `folder`, as a graph where the target has a lowering.

    Medusa's heads stay as they are: numpy runs them. A graph rounds the inputs of its linears to int8,
    whatever its target does: what that changes in a draft may cost time, never a wrong token. `kv_bytes` is
    what a head's key and value take in the target's exact pool.
    """
    if head.config.kind == "medusa" or target not in LOWERED:
        head.save(folder)
        return
    load(LOWERED[target], extra=target)(head, folder)
    kept = _KEPT if head.config.kind == "eagle3" else (TOKENS,)
    Head(head.config, {name: head.tensors[name] for name in kept if head.has(name)}).save(folder)
    layer = head.config.decoder()
    spec = EngineSpec(
        target=target,
        architecture=head.config.kind,
        vocab_size=head.config.draft_vocab_size,
        max_context=layer.max_context,
        block_size=block_size,
        kv_cache="f32",
        openvino=OpenVinoOptions(dynamic_quantization=32),
        num_layers=1,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        window=layer.windows[0],
        weight_bytes=sum(file.stat().st_size for file in folder.glob("*.bin")),
        kv_bytes_per_token=layer.num_kv_heads * kv_bytes(layer.head_dim),
        hidden_states=HiddenStates(size=head.config.hidden_size, layers=(FINAL,)),
        versions=versions(),
        checkpoint={},
        files=own_files(folder, target),
    )
    spec.save(folder)
