"""Groups of inputs that need not lie side by side, as ``g_idx`` stores them."""

import torch
from torch import Tensor

from qtool.core.formats.parts import Parts


def read_order(parts: Parts, name: str, in_features: int, group_size: int) -> Tensor | None:
    """The inputs [K] int64 group by group, each group's own in ascending order; None when in order already.

    The stored tensor gives each of K inputs its group. Every group has to hold `group_size` inputs, but for
    the last, which may hold what is left.
    """
    groups = parts.read(name, torch.int32, (in_features,)).long()
    wanted = torch.arange(in_features) // group_size
    if torch.equal(groups, wanted):
        return None
    last = int(wanted[-1])
    if int(groups.min()) < 0 or int(groups.max()) > last:
        raise parts.error(
            name,
            f"names group {int(groups.min())} to {int(groups.max())}, wanted 0 to {last} for "
            f"{in_features} inputs in groups of {group_size}",
        )
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], wanted):
        raise parts.error(name, f"gives groups other numbers of inputs than {group_size}")
    return order
