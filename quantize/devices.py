"""What computes: the CPU, or GPUs."""

import re

import torch

from qtool.errors import UsageError


def parse_devices(text: str) -> tuple[torch.device, ...]:
    """Devices as in ``cpu``, ``cuda`` or ``cuda:0,cuda:1``; ``auto`` is all the GPUs, or the CPU without any.

    Raises UsageError for another text, and for GPUs that torch does not have here.
    """
    if text == "auto":
        found = tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))
        return found or (torch.device("cpu"),)
    names = [name.strip() for name in text.split(",")]
    if names == ["cpu"]:
        return (torch.device("cpu"),)
    if not all(re.fullmatch(r"cuda(:\d+)?", name) for name in names):
        raise UsageError(f"device {text!r} is unknown; wanted cpu, cuda, cuda:0,cuda:1 or auto")
    if not torch.cuda.is_available():
        why = "it was built without CUDA" if torch.version.cuda is None else "it finds no GPU"
        raise UsageError(f"device {text!r}: torch {torch.__version__} cannot use it, since {why}; use cpu")
    indices = [int(name.partition(":")[2] or torch.cuda.current_device()) for name in names]
    count = torch.cuda.device_count()
    if max(indices) >= count:
        raise UsageError(f"device {text!r}: there are {count} GPUs, cuda:0 to cuda:{count - 1}")
    if len(set(indices)) < len(indices):
        raise UsageError(f"device {text!r} names a GPU twice")
    return tuple(torch.device("cuda", index) for index in indices)
