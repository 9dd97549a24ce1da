"""Linears that engines multiply as one, and that therefore have to share a scale of the whole tensor."""

from collections.abc import Collection

from qtool.calibrate.experts import expert_of

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))


def fused_with(module: str, modules: Collection[str]) -> tuple[str, ...]:
    """Those of `modules` that engines fuse with `module`, itself among them, in the fused one's order."""
    parent, dot, name = module.rpartition(".")
    together = next((names for names in _FUSED if name in names), (name,))
    return tuple(full for full in (f"{parent}{dot}{one}" for one in together) if full in modules)


def of_one_format(module: str, modules: Collection[str]) -> tuple[str, ...]:
    """Those of `modules` that engines want in the number format of `module`, itself among them.

    Beside what they fuse, that is all the experts of a layer: one kernel computes with them.
    """
    expert = expert_of(module)
    if expert is None:
        return fused_with(module, modules)
    mixture = expert.rpartition(".")[0]
    return tuple(name for name in modules if name.startswith(f"{mixture}."))
