"""Which number formats need which GPUs, asked before any work."""

from collections.abc import Sequence

from qtool.compile.backends.tensorrt.flavour import Flavour, capabilities, check_gpu, load
from qtool.core.checkpoint import Checkpoint
from qtool.core.schemes import NVFP4_ACTIVATIONS, Fp8Scheme, LinearScheme
from qtool.errors import UsageError


def check_formats(checkpoint: Checkpoint, flavour: Flavour, asked: Sequence[int]) -> None:
    """Raise UsageError naming the first linear that needs another GPU than one of those to build for.

    The builder refuses fp8 for GPUs before Ada, weights alone too, and products of fp4 before Blackwell.
    """
    schemes = checkpoint.schemes()
    needs = {module: least_capability(scheme) for module, scheme in schemes.items()}
    if not any(needs.values()):
        return
    module = max(needs, key=needs.__getitem__)
    chosen, least = _gpus(flavour, asked), needs[module]
    if lacking := [capability for capability in chosen if capability < least]:
        others = ",".join(str(capability) for capability in chosen if capability >= least)
        advice = f"build for the others alone, --cc {others}" if others else "take another"
        raise UsageError(
            f"{checkpoint.path}: {module} is quantized as {schemes[module]}, which GPUs of compute "
            f"capability {', '.join(map(str, lacking))} do not know, only those from {least} on; {advice}"
        )


def least_capability(scheme: LinearScheme) -> int:
    """The compute capability from which on GPUs know the format; 0: all of them."""
    if scheme.activation == NVFP4_ACTIVATIONS:
        return 100
    return 89 if isinstance(scheme.weight, Fp8Scheme) else 0


def _gpus(flavour: Flavour, asked: Sequence[int]) -> tuple[int, ...]:
    if flavour.ahead_of_time:
        return capabilities(flavour, load(flavour), asked)
    check_gpu(flavour)
    import torch

    major, minor = torch.cuda.get_device_capability()
    return (10 * major + minor,)
