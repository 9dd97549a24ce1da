"""What a module gave for each window, given again instead of computed anew.

A layer is run several times over the same windows while its linears are quantized one after the other. Its
attention need not be where that stays as it is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn


class Replay:
    """The outputs of `module` for all windows, in order; None in its place: always computed."""

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._outputs: list[Any] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Remember what the module gives while the block runs windows."""
        if self._module is None:
            yield
            return
        hook = self._module.register_forward_hook(lambda _, __, output: self._outputs.append(output))
        try:
            yield
        finally:
            hook.remove()

    @contextmanager
    def playing(self) -> Iterator[None]:
        """Give that again while the block runs the same windows in the same order; compute if none was."""
        if self._module is None or not self._outputs:
            yield
            return
        outputs = iter(self._outputs)
        self._module.forward = lambda *_, **__: next(outputs)
        try:
            yield
        finally:
            del self._module.forward


@contextmanager
def silenced(linear: nn.Linear) -> Iterator[None]:
    """Let `linear` give zeros [..., N] instead of computing while the block runs: nobody wants its output."""
    module, out_features = cast(nn.Module, linear), linear.out_features

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros((), dtype=x.dtype, device=x.device).expand(*x.shape[:-1], out_features)

    module.forward = zeros
    try:
        yield
    finally:
        del module.forward
