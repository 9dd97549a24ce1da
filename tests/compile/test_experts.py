"""Which experts a router chooses, in every engine."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig

from qtool.compile.build import compile_engine
from qtool.runtime.engines import open_engine
from tests.compile.checkpoints import SHAPE, write_model
from tests.compile.steps import difference, in_chunks

TOKENS = list(range(20))


@pytest.mark.parametrize("target", ["reference", "openvino", "onnx"])
def test_the_first_of_experts_with_equal_shares_is_chosen(target: str, tmp_path: Path) -> None:
    config = MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    logits = []
    for name, factor in (("model", 1), ("another", 2)):
        folder = write_model(config, tmp_path / name)
        tensors = load_file(folder / "model.safetensors")
        for stored in tensors:
            if stored.endswith("gate.weight"):
                tensors[stored] = tensors[stored][:1].repeat(4, 1)
            if ".experts.2." in stored or ".experts.3." in stored:
                tensors[stored] *= factor
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        compile_engine(folder, target, tmp_path / f"{name}.engine")
        engine = open_engine(tmp_path / f"{name}.engine", kv_cache_tokens=128, threads=1)
        logits.append(in_chunks(engine, TOKENS, [3], (20,)))
    assert difference(*logits) == 0
