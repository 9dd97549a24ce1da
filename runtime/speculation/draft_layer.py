"""EAGLE's layer as an engine: a step of tokens, each with a feature beside it."""

from typing import Protocol

from qtool.runtime.engines.contract import Floats, Step, StepResult


class DraftLayer(Protocol):
    """Runs steps over a pool of its own."""

    block_size: int
    num_blocks: int
    takes_trees: bool

    def run(self, step: Step, features: Floats) -> StepResult:
        """Logits over the head's tokens, and features; `features` [T, hidden] come beside the tokens."""
        ...
