"""Which quantization schemes a target executes, asked before any work."""

from dataclasses import dataclass

from qtool.core.checkpoint import Checkpoint
from qtool.core.schemes import IntScheme, LinearScheme
from qtool.errors import UsageError


@dataclass(frozen=True)
class Abilities:
    """What a target can do with a quantized linear. Dense ones every target can."""

    int_bits: tuple[int, ...]
    """Of integer weights, in groups or channels, with and without zero points."""
    fp8: bool
    """Weights in float8_e4m3fn."""
    activations: bool
    """int8 and fp8 ones, static and dynamic."""

    def can(self, scheme: LinearScheme) -> bool:
        """Whether the target executes `scheme`."""
        weight = scheme.weight
        known = weight.num_bits in self.int_bits if isinstance(weight, IntScheme) else self.fp8
        return known and (self.activations or scheme.activation is None)

    def __str__(self) -> str:
        weights = [f"int{bits}" for bits in self.int_bits] + ["fp8"] * self.fp8
        activations = "with or without" if self.activations else "without"
        return f"weights in {', '.join(weights)}, {activations} quantized activations"


def check_schemes(checkpoint: Checkpoint, target: str, abilities: Abilities) -> None:
    """Raise UsageError naming the first linear, its scheme, and those that `target` executes."""
    for module, scheme in checkpoint.schemes().items():
        if not abilities.can(scheme):
            raise UsageError(
                f"{checkpoint.path}: {module} is quantized as {scheme}, which target {target} does not "
                f"execute; it takes {abilities}"
            )


def check_dynamic_quantization(checkpoint: Checkpoint, group_size: int) -> None:
    """Raise UsageError naming the first linear whose inputs would not be rounded, its weights' groups cutting
    those of `group_size` inputs: OpenVINO computes such a one with its inputs as they are, without a word."""
    for module, scheme in checkpoint.schemes().items():
        weight = scheme.weight
        if isinstance(weight, IntScheme) and (weight.group_size or group_size) % group_size:
            raise UsageError(
                f"{checkpoint.path}: dynamic_quantization is {group_size}, which does not divide the group "
                f"size {weight.group_size} of {module}; take a smaller one, or none"
            )
