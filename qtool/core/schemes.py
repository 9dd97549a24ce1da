"""Number formats: what a weight's codes mean. How the numbers are chosen is a method's business."""

from dataclasses import dataclass


@dataclass(frozen=True)
class IntScheme:
    """Signed integers with one scale for each group of `group_size` inputs of an output channel.

    A weight is ``scale * (code - zero_point)``; codes and zero points lie in ``[low, high]``.
    `group_size` None means one group for the whole channel.
    """

    num_bits: int
    group_size: int | None
    symmetric: bool

    @property
    def low(self) -> int:
        """The smallest code."""
        return -(1 << (self.num_bits - 1))

    @property
    def high(self) -> int:
        """The largest code."""
        return (1 << (self.num_bits - 1)) - 1

    def num_groups(self, in_features: int) -> int:
        """G, the number of groups of a channel with K = `in_features` inputs."""
        return 1 if self.group_size is None else in_features // self.group_size

    def __str__(self) -> str:
        group = "channel" if self.group_size is None else f"group {self.group_size}"
        return f"int{self.num_bits} {'symmetric' if self.symmetric else 'asymmetric'}, {group}"
