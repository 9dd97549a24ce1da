"""What TensorRT's parser made of the graph, computed in torch and held to the reference engine."""

from pathlib import Path

import numpy as np
import pytest
import torch

from qtool.compile.backends.onnx import write_onnx
from qtool.compile.backends.tensorrt.zero_points import fold_zero_points
from qtool.compile.config import read_config
from qtool.compile.weights import CheckpointWeights
from qtool.core.checkpoint import Checkpoint
from qtool.core.recipe import Recipe
from qtool.core.schemes import IntScheme
from qtool.quantize.pipeline import quantize_checkpoint
from qtool.runtime.engines import open_engine
from qtool.runtime.engines.contract import Step
from qtool.runtime.engines.padded import pad
from tests.compile.peer_checkpoints import write_compressed
from tests.compile.steps import Chunk, difference, step_of
from tests.compile.two_layers import LAYERS, write_two_layers

pytest.importorskip("tensorrt_rtx_bindings")
from tests.compile.tensorrt_interpreter import Interpreter

HEADS, BLOCK, DIM = 3, 32, 64
TABLES = [[3, 0, 5], [1, 4]]
SCHEMES = {
    "dense": {},
    "symmetric int4": {"mlp": IntScheme(4, 64, True)},
    "asymmetric int4": {"mlp": IntScheme(4, 96, False)},
    "int8": {"mlp": IntScheme(8, None, True)},
}
ROUNDED = ("int8 dynamic", "fp8 static", "fp8 blocks")
"""Of compressed-tensors: weights and inputs of all linears in 8 bits."""
BOUNDS = {
    torch.float32: {"asymmetric int4": 2e-4, "int8 dynamic": 0.02, "fp8 blocks": 2e-3},
    torch.float16: dict.fromkeys(ROUNDED, 0.05),
}
"""Zero points' factors are of float16 in both. An input between two codes takes the next one when a sum ends
in another bit, and what follows with it: see ROUNDED in `test_peer_formats`."""


HEAD = "head in int8"
"""A tied one, which gets codes of its own."""


@pytest.fixture(scope="module", params=[*SCHEMES, *ROUNDED, HEAD], ids=str)
def checkpoint(
    request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Two layers of SmolLM2."""
    folder, name = tmp_path_factory.mktemp("network") / "model", request.param
    if name in SCHEMES:
        return write_two_layers(smollm2, folder, SCHEMES[name])
    dense = write_two_layers(smollm2, folder.with_name("plain"), {})
    if name == HEAD:
        text = folder.with_name("text.txt")
        text.write_text("A short text, to see a few tokens. " * 20)
        rule = {"targets": ["lm_head"], "weights": {"num_bits": 8, "group_size": 32}}
        calibration = {"dataset": str(text), "num_samples": 2, "seq_len": 16}
        recipe = {"calibration": calibration, "quantization": {"rules": [rule], "keep": []}}
        quantize_checkpoint(folder.with_name("plain.dense"), Recipe.model_validate(recipe), folder)
        return folder
    return write_compressed(dense, folder, name)


class Runner:
    """The network as an engine, its pool in torch."""

    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        self.network = Interpreter(model, dtype)
        shape = (2 * LAYERS, 8, HEADS, BLOCK, DIM)
        self._pool = torch.zeros(shape, dtype=torch.float16 if dtype == torch.float16 else torch.float32)

    def run(self, step: Step) -> np.ndarray:
        batch = pad(step, range(len(step.new_lens)), BLOCK, [None])
        plain = {
            "token_ids": batch.token_ids,
            "positions": batch.positions,
            "block_tables": batch.block_tables,
            "logit_rows": batch.logit_rows,
            "attention_mask": batch.masks[None],
        }
        pools = {
            f"{kind}_pool.{layer}": self._pool[2 * layer + place].flatten(0, 1)
            for layer in range(LAYERS)
            for place, kind in enumerate(("key", "value"))
        }
        found = self.network.run({name: torch.from_numpy(value) for name, value in plain.items()} | pools)
        block, offset = (torch.from_numpy(part).long() for part in np.divmod(batch.slots, BLOCK))
        row, token = (
            torch.from_numpy(p).long() for p in np.divmod(batch.token_rows, batch.token_ids.shape[1])
        )
        for layer in range(LAYERS):
            for place, kind in enumerate(("key", "value")):
                new = found[f"new_{kind}.{layer}"]
                self._pool[2 * layer + place][block, :, offset] = new[row, :, token]
        return found["logits"].numpy()


@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 1e-5), (torch.float16, 0.02)],  # sums in another order; numbers of 11 bits throughout
    ids=["exactly", "in its own precision"],
)
def test_the_parsed_network_computes_what_the_reference_does(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path, dtype: torch.dtype, bound: float
) -> None:
    """Prefill of two sequences, a chunk beside a decoded token, then a tree of drafts."""
    config = read_config(Checkpoint(checkpoint).config, "config.json")
    weights = CheckpointWeights(config, Checkpoint(checkpoint))
    model = write_onnx(config, weights, tmp_path, dtype=torch.float16)
    fold_zero_points(model)
    network, reference = Runner(model, dtype), open_engine(checkpoint, kv_cache_tokens=256)
    tokens = np.random.default_rng(2).integers(0, 49152, 80).tolist()
    first = step_of(Chunk(tokens[:29], 0, TABLES[0]), Chunk(tokens[:7], 0, TABLES[1]), rows=[0, 28, 35])
    second = step_of(Chunk(tokens[29:36], 29, TABLES[0]), Chunk(tokens[7:8], 7, TABLES[1]), rows=[6, 7])
    chain = step_of(Chunk(tokens[36:39], 36, TABLES[0]))
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
    tree = Step(**{**vars(chain), "positions": np.array([36, 37, 37], np.int32), "masks": [mask]})
    name = request.node.callspec.params["checkpoint"]
    bound = BOUNDS[dtype].get(name, bound)
    for step in (first, second, tree):
        assert difference(network.run(step), reference.run(step)) < bound


def test_no_input_of_the_graph_is_lost_to_the_parser(checkpoint: Path, tmp_path: Path) -> None:
    config = read_config(Checkpoint(checkpoint).config, "config.json")
    weights = CheckpointWeights(config, Checkpoint(checkpoint))
    model = write_onnx(config, weights, tmp_path, dtype=torch.float16)
    fold_zero_points(model)
    pools = {f"{kind}_pool.{layer}" for kind in ("key", "value") for layer in range(LAYERS)}
    plain = {"token_ids", "positions", "block_tables", "logit_rows", "attention_mask"}
    assert set(Interpreter(model).inputs) == plain | pools
