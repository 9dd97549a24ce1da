"""The torch engine as it runs on a GPU, on a CPU in Triton's interpreter, held to the reference engine.

Run as a script, since Triton decides when it is imported whether kernels are compiled or interpreted. It
takes folders of checkpoints, and tells as JSON how far the steps of each are from the reference.
"""

import json
import os
import sys
import warnings
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
warnings.simplefilter("error")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from qtool.compile.config import read_config  # noqa: E402
from qtool.compile.hidden import FINAL, HiddenStates  # noqa: E402
from qtool.compile.weights import CheckpointWeights  # noqa: E402
from qtool.core.checkpoint import Checkpoint  # noqa: E402
from qtool.runtime.engines import fused  # noqa: E402
from qtool.runtime.engines.contract import Engine, Step, slots_of  # noqa: E402
from qtool.runtime.engines.reference import ReferenceEngine  # noqa: E402
from tests.compile import kernels_interpreter  # noqa: E402
from tests.compile.steps import Chunk, difference, step_of  # noqa: E402

BLOCK = 32
TOKENS = np.random.default_rng(0).integers(0, 101, 90).tolist()
TABLES = [[9, 2, 11, 5], [7, 0, 3], [1, 4]]
PARENTS = (-1, 0, 0, 1, 2)
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


def far(folder: str) -> list[float]:
    checkpoint = Checkpoint(Path(folder))
    config = read_config(checkpoint.config, folder)
    hidden = HiddenStates(size=config.hidden_size, layers=(1, FINAL))
    engine = fused.open_fused(
        checkpoint, config, None, kv_cache_tokens=14 * BLOCK, hidden_states=hidden, device="cuda"
    )
    reference = ReferenceEngine(
        config,
        CheckpointWeights(config, checkpoint),
        num_blocks=14,
        block_size=BLOCK,
        kv_cache=checkpoint.quantized_kv_cache(config.num_layers),
        hidden_states=hidden,
    )
    return [difference(got, wanted) for got, wanted in zip(steps(engine), steps(reference), strict=True)]


if __name__ == "__main__":
    kernels_interpreter.widen_bfloat16()
    fused._find = lambda device: torch.device("cpu")
    json.dump([far(folder) for folder in sys.argv[1:]], sys.stdout)
