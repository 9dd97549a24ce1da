"""The torch engine as it runs on a GPU, on a CPU in Triton's interpreter, held to the reference engine.

Run as a script, since Triton decides when it is imported whether kernels are compiled or interpreted: cases
come as JSON through stdin, how far each is from the reference leaves as JSON through stdout.
"""

import json
import math
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("error")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from qtool.compile.backends.fused_pool import KvScales  # noqa: E402
from qtool.compile.config import read_config  # noqa: E402
from qtool.compile.hidden import FINAL, HiddenStates  # noqa: E402
from qtool.compile.weights import CheckpointWeights  # noqa: E402
from qtool.core.checkpoint import Checkpoint  # noqa: E402
from qtool.runtime.engines.contract import Engine, Step, StepResult, slots_of  # noqa: E402
from qtool.runtime.engines.fused import FusedEngine  # noqa: E402
from qtool.runtime.engines.reference import ReferenceEngine  # noqa: E402
from tests.compile import kernels_interpreter  # noqa: E402
from tests.compile.steps import Chunk, difference, step_of  # noqa: E402

BLOCK = 16
TOKENS = np.random.default_rng(0).integers(0, 101, 90).tolist()
TABLES = [[9, 2, 11, 5], [7, 0, 3], [1, 4]]
PARENTS = (-1, 0, 0, 1, 2)
PEAKS = {torch.int8: 127, torch.float8_e4m3fn: 448}
PATH = np.array([0, 2, 4], np.int32)


def tree_step(past: int) -> Step:
    """A tree of drafts after `past` tokens of the first sequence, a token of the second."""
    mask = np.eye(len(PARENTS), dtype=np.bool_)
    for node, parent in enumerate(PARENTS[1:], 1):
        mask[node] |= mask[parent]
    chain = step_of(
        Chunk(TOKENS[60 : 60 + len(PARENTS)], past, TABLES[0]), Chunk(TOKENS[50:51], 13, TABLES[1])
    )
    positions = chain.positions.copy()
    positions[: len(PARENTS)] = past + mask.sum(1) - 1
    return Step(**{**vars(chain), "positions": positions, "masks": [mask, None]})


def steps(engine: Engine) -> list[np.ndarray]:
    """Prompts whole and in chunks, decoding beside a prompt, a tree, and what follows its accepted path."""
    found = [
        engine.run(step_of(Chunk(TOKENS[:37], 0, TABLES[0]), Chunk(TOKENS[40:52], 0, TABLES[1]))),
        engine.run(
            step_of(
                Chunk(TOKENS[37:46], 37, TABLES[0]),
                Chunk(TOKENS[52:53], 12, TABLES[1]),
                Chunk(TOKENS[:5], 0, TABLES[2]),
                rows=[0, 8, 9, 14],
            )
        ),
        engine.run(tree_step(46)),
    ]
    engine.move_slots(
        slots_of(TABLES[0], 46 + PATH, BLOCK), slots_of(TABLES[0], 46 + np.arange(3, dtype=np.int32), BLOCK)
    )
    engine.copy_block(TABLES[1][0], 13)
    last = step_of(Chunk(TOKENS[3:4], 49, TABLES[0]), Chunk(TOKENS[4:5], 14, [13]), rows=[0, 1])
    result = engine.run_with_hidden(Step(**{**vars(last), "hidden_rows": np.array([1], np.int32)}))
    return [*found, result.logits, result.hidden]


class Rounded(ReferenceEngine):
    """The reference with a past that is rounded to codes once it is past."""

    kv_dtype: torch.dtype
    scales: KvScales

    def run_with_hidden(self, step: Step) -> StepResult:
        result = super().run_with_hidden(step)
        for cache, scales in ((self._pool.keys, self.scales.keys), (self._pool.values, self.scales.values)):
            scale = scales[:, None, None, :, None]
            codes = cache / scale
            limit = PEAKS[self.kv_dtype]
            codes = codes.round() if self.kv_dtype == torch.int8 else codes
            cache.copy_(codes.clamp(-limit, limit).to(self.kv_dtype).float() * scale)
        return result


def far(folder: str, dtype: str, kv_dtype: str | None) -> list[float]:
    checkpoint = Checkpoint(Path(folder))
    config = read_config(checkpoint.config, folder)
    weights = CheckpointWeights(config, checkpoint)
    hidden = HiddenStates(size=config.hidden_size, layers=(1, FINAL))
    common: dict[str, Any] = {"num_blocks": 14, "block_size": BLOCK, "hidden_states": hidden}
    fused: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": torch.device("cpu")}
    if kv_dtype is None:
        reference = ReferenceEngine(config, weights, **common)
    else:
        reference = Rounded(config, weights, **common)
        reference.kv_dtype = fused["kv_dtype"] = getattr(torch, kv_dtype)
        # each layer and head its own: any other's would show
        shape = config.num_layers, config.num_kv_heads
        peaks = torch.linspace(6, 18, math.prod(shape)).view(shape) / PEAKS[reference.kv_dtype]
        reference.scales = fused["kv_scales"] = KvScales(peaks, peaks.flip(0, 1))
    engine = FusedEngine(config, weights, **common, **fused)
    return [difference(got, wanted) for got, wanted in zip(steps(engine), steps(reference), strict=True)]


if __name__ == "__main__":
    kernels_interpreter.widen_bfloat16()
    cases: list[dict[str, Any]] = json.load(sys.stdin)
    json.dump([far(**case) for case in cases], sys.stdout)
