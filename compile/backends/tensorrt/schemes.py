"""Which number formats need which GPUs, asked before any work."""

from collections.abc import Sequence

from qtool.compile.backends.tensorrt.flavour import Flavour, capabilities, check_gpu, load
from qtool.core.checkpoint import Checkpoint
from qtool.core.schemes import Fp8Scheme
from qtool.errors import UsageError

FP8_CAPABILITY = 89
"""Of the first GPUs that know fp8: Ada."""


def check_formats(checkpoint: Checkpoint, flavour: Flavour, asked: Sequence[int]) -> None:
    """Raise UsageError naming the first linear that needs another GPU than one of those to build for.

    fp8 is the only such format: the builder refuses it for GPUs before Ada, weights alone too.
    """
    needs = next((m for m, s in checkpoint.schemes().items() if isinstance(s.weight, Fp8Scheme)), None)
    if needs is None:
        return
    chosen = _gpus(flavour, asked)
    if lacking := [capability for capability in chosen if capability < FP8_CAPABILITY]:
        others = [str(capability) for capability in chosen if capability >= FP8_CAPABILITY]
        advice = f"build for the others alone, --cc {','.join(others)}" if others else "take another format"
        raise UsageError(
            f"{checkpoint.path}: {needs} is quantized to fp8, which GPUs of compute capability "
            f"{', '.join(map(str, lacking))} do not know, only those from {FP8_CAPABILITY} on; {advice}"
        )


def _gpus(flavour: Flavour, asked: Sequence[int]) -> tuple[int, ...]:
    if flavour.ahead_of_time:
        return capabilities(flavour, load(flavour), asked)
    check_gpu(flavour)
    import torch

    major, minor = torch.cuda.get_device_capability()
    return (10 * major + minor,)
