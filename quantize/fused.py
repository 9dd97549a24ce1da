"""Linears that engines multiply as one, and that therefore have to share a scale of the whole tensor."""

from collections.abc import Collection

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def fused_with(module: str, modules: Collection[str]) -> tuple[str, ...]:
    """Those of `modules` that engines fuse with `module`, itself among them, in the fused one's order."""
    parent, dot, name = module.rpartition(".")
    together = next((names for names in _FUSED if name in names), (name,))
    return tuple(full for full in (f"{parent}{dot}{one}" for one in together) if full in modules)
