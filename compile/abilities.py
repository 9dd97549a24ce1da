"""Which quantization schemes a target executes, asked before any work."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qtool.compile.code_products import multiplies_codes
from qtool.core.schemes import Fp4Scheme, IntScheme, LinearScheme, WeightScheme
from qtool.errors import UsageError

if TYPE_CHECKING:
    from qtool.core.checkpoint import Checkpoint  # needs torch, which saying no does without

WEIGHTS = (*(f"int{bits}" for bits in range(2, 9)), "fp8", "nvfp4", "mxfp4")
"""Number formats of weights, in groups, blocks or channels as each has them, with and without zero points."""


@dataclass(frozen=True)
class Abilities:
    """What a target can do with a quantized linear. Dense ones every target can."""

    weights: tuple[str, ...] = WEIGHTS
    only_codes: bool = False
    """Rounded inputs only where codes are multiplied by codes, see `code_products.codes_at_once`: the target
    is there for its 8-bit kernels, and would otherwise compute in 16 bits without a word."""

    def refusal(self, scheme: LinearScheme) -> str | None:
        """What the target takes instead of `scheme`; None: it executes that."""
        if kind(scheme.weight) not in self.weights:
            return f"it takes weights in {', '.join(self.weights)}"
        if scheme.activation is None or not self.only_codes or multiplies_codes(scheme):
            return None
        return (
            "it multiplies rounded inputs by weights of their own kind alone: nvfp4 by nvfp4, int8 by 5 "
            "to 8 bits, fp8 by fp8, in channels or in groups that those of the inputs divide, symmetric if "
            "in groups; take such weights, or leave activations out"
        )


def kind(scheme: WeightScheme) -> str:
    """The number format of a weight, as `WEIGHTS` calls it."""
    if isinstance(scheme, IntScheme):
        return f"int{scheme.num_bits}"
    return scheme.kind if isinstance(scheme, Fp4Scheme) else "fp8"


def check_schemes(checkpoint: "Checkpoint", target: str, abilities: Abilities) -> None:
    """Raise UsageError naming the first linear, its scheme, and those that `target` executes."""
    for module, scheme in checkpoint.schemes().items():
        if refusal := abilities.refusal(scheme):
            raise UsageError(
                f"{checkpoint.path}: {module} is quantized as {scheme}, which target {target} does not "
                f"execute; {refusal}"
            )


def check_dynamic_quantization(checkpoint: "Checkpoint", group_size: int) -> None:
    """Raise UsageError naming the first linear whose inputs would not be rounded, its weights' groups cutting
    those of `group_size` inputs: OpenVINO computes such a one with its inputs as they are, without a word.
    Raise it too where no linear is of integers, whose inputs alone are rounded."""
    schemes = checkpoint.schemes()
    if not any(isinstance(scheme.weight, IntScheme) for scheme in schemes.values()):
        raise UsageError(
            f"{checkpoint.path}: dynamic_quantization is {group_size}, but no linear is quantized to "
            "integers, so it would round nothing; leave it out, or quantize the checkpoint first"
        )
    for module, scheme in schemes.items():
        weight = scheme.weight
        if isinstance(weight, IntScheme) and (weight.group_size or group_size) % group_size:
            raise UsageError(
                f"{checkpoint.path}: dynamic_quantization is {group_size}, which does not divide the group "
                f"size {weight.group_size} of {module}; take a smaller one, or none"
            )
