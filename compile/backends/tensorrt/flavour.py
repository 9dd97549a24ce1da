"""The two libraries that share one Python interface: TensorRT for RTX, and TensorRT proper."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from qtool.errors import QtoolError, UsageError


@dataclass(frozen=True)
class Flavour:
    """A library, how it is imported and installed, and whether it builds for GPUs that are not there."""

    target: str
    modules: tuple[str, ...]
    """Names that its Python bindings go by, as they were installed; the first found is taken."""
    extra: str
    default_capabilities: tuple[int, ...]
    """GPUs that a plan is built for unless asked otherwise; empty where it is built for the one present."""

    @property
    def ahead_of_time(self) -> bool:
        """Whether it builds without a GPU."""
        return bool(self.default_capabilities)


FLAVOURS = {
    flavour.target: flavour
    for flavour in (
        Flavour("tensorrt-rtx", ("tensorrt_rtx", "tensorrt_rtx_bindings"), "tensorrt-rtx", (80, 86, 89, 120)),
        Flavour("tensorrt", ("tensorrt", "tensorrt_bindings"), "tensorrt", ()),
    )
}


def load(flavour: Flavour) -> ModuleType:
    """Import the library; QtoolError names the extra to install when it is missing or cannot be loaded."""
    problems = []
    for name in flavour.modules:
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            problems.append(f"{error}")
        except ImportError as error:
            raise QtoolError(
                f"target {flavour.target}: module {name} is installed but cannot be loaded ({error}); "
                f"reinstall it with: pip install -e '.[{flavour.extra}]' (in qtool's folder)"
            ) from error
    raise QtoolError(
        f"target {flavour.target}: its library is not installed ({'; '.join(problems)}); "
        f"install it with: pip install -e '.[{flavour.extra}]' (in qtool's folder)"
    )


def check_gpu(flavour: Flavour) -> None:
    """Raise QtoolError where the library needs a GPU to build and there is none."""
    import torch

    if not flavour.ahead_of_time and not torch.cuda.is_available():
        raise QtoolError(
            f"target {flavour.target}: builds on the GPU that it is for, and torch sees none here; "
            "compile on that machine, or for tensorrt-rtx, which builds without a GPU"
        )


def capabilities(flavour: Flavour, trt: ModuleType, asked: Sequence[int]) -> tuple[int, ...]:
    """The compute capabilities to build for, in ascending order.

    Raises UsageError for one that the library does not know, or for any where it builds for the GPU present.
    """
    if not flavour.ahead_of_time:
        if asked:
            raise UsageError(f"target {flavour.target}: builds for the GPU present alone; leave --cc out")
        return ()
    known = sorted(int(name[2:]) for name in trt.ComputeCapability.__members__ if name.startswith("SM"))
    chosen = tuple(sorted(set(asked or flavour.default_capabilities)))
    for capability in chosen:
        if capability not in known:
            raise UsageError(
                f"compute capability {capability} is not supported by {flavour.target} {trt.__version__}; "
                f"wanted some of {', '.join(map(str, known))}"
                + (f" ({capability} is what target tensorrt is for)" if capability in _DATA_CENTRE else "")
            )
    return chosen


_DATA_CENTRE = {90, 100, 103}
