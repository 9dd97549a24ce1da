"""EAGLE's layer compiled for OpenVINO. Imports no torch."""

from pathlib import Path

import numpy as np

from qtool.runtime.engines.contract import Floats, Step, StepResult
from qtool.runtime.engines.openvino import OpenVinoEngine


class OpenVinoLayer:
    """The engine's driver, and one more input."""

    def __init__(self, folder: Path, *, num_tokens: int, threads: int | None = None) -> None:
        self._engine = OpenVinoEngine(folder, kv_cache_tokens=num_tokens, threads=threads)
        self.block_size, self.num_blocks = self._engine.block_size, self._engine.num_blocks
        self.takes_trees = self._engine.takes_trees

    def run(self, step: Step, features: Floats) -> StepResult:
        """Logits and features of the wanted rows."""
        self._engine.set_input("features", np.ascontiguousarray(features, np.float32))
        return self._engine.run_with_hidden(step)
