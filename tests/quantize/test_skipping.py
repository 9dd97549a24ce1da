"""A checkpoint without some of its layers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtool.cli.skip_layers import parse_layers
from qtool.errors import UsageError
from qtool.quantize.skipping import skip_layers


def test_the_layers_that_are_left_do_what_they_did(tiny: Path, tmp_path: Path) -> None:
    skip_layers(tiny, frozenset({1}), tmp_path / "thin")
    whole = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    del whole.model.layers[1]
    for place, layer in enumerate(whole.model.layers):
        layer.self_attn.layer_idx = place
    whole.config.num_hidden_layers = 2
    thin = AutoModelForCausalLM.from_pretrained(tmp_path / "thin", dtype=torch.float32)
    tokens = torch.tensor([[5, 6, 7, 40, 300]])
    assert torch.equal(thin(tokens).logits, whole(tokens).logits)
    assert (tmp_path / "thin" / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()


def test_layers_are_read_or_refused(tiny: Path, tmp_path: Path) -> None:
    assert parse_layers("4, 8-10,9") == {4, 8, 9, 10}
    for text in ("", "x", "3-1", "1;2", "-1", "0-99999999999"):
        with pytest.raises(UsageError, match="is no layer or range"):
            parse_layers(text)
    for layers in ({3}, {0, 1, 2}):
        with pytest.raises(UsageError, match="has layers 0 to 2"):
            skip_layers(tiny, frozenset(layers), tmp_path / "thin")
    assert not (tmp_path / "thin").exists()
