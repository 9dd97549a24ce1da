"""Draft heads in the layouts of others: the same network as ours with the same numbers."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qtool.compile.heads.head import EMBED, LM_HEAD, TOKENS, Head, read_head
from qtool.errors import QtoolError, UsageError
from tests.runtime.heads import seeded_head

Write = Callable[[Head, Path], None]


def layer_of(head: Head) -> dict[str, object]:
    """The config.json that others write for the layer."""
    return {**head.config.layer, "model_type": "llama", "num_hidden_layers": 1, "torch_dtype": "float16"}


def put(folder: Path, config: dict[str, object], tensors: dict[str, Tensor], name: str) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {key: tensor.contiguous() for key, tensor in tensors.items()}
    if name.endswith(".safetensors"):
        save_file(tensors, folder / name)
    else:
        torch.save(tensors, folder / name)


def offsets(head: Head) -> dict[str, Tensor]:
    """The mapping as EAGLE-3 stores it: to the target, what to add, and back, which tokens there are."""
    tokens = head.tensors[TOKENS].long()
    known = torch.zeros(head.config.vocab_size, dtype=torch.bool)
    known[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": known}


def renamed(head: Head, **parts: str) -> dict[str, Tensor]:
    named = {}
    for name, tensor in head.tensors.items():
        if name == TOKENS:
            continue
        for ours, theirs in parts.items():
            prefix = ours.replace("_0", ".0")
            if name.startswith(f"{prefix}."):
                name = theirs + name[len(prefix) :]
        named[name] = tensor
    return named


def safeailab_eagle(head: Head, folder: Path) -> None:
    """EAGLE-1: the target has the output matrix, and the embeddings too in newer ones."""
    tensors = {
        name: tensor
        for name, tensor in renamed(head).items()
        if name not in (LM_HEAD, EMBED, "embedding_norm.weight", "layers.0.input_layernorm.weight")
    }
    put(folder, {**layer_of(head), "bias": False}, tensors, "pytorch_model.bin")


def speculators_eagle(head: Head, folder: Path) -> None:
    parts = {"layers_0": "transformer", "fc": "fusion_fc", "embedding_norm": "embedding_layernorm"}
    tensors = {
        name: tensor for name, tensor in renamed(head, **parts).items() if name not in (LM_HEAD, EMBED)
    }
    config = {
        "speculators_model_type": "eagle",
        "layernorms": True,
        "fusion_bias": False,
        "transformer_layer_config": layer_of(head),
    }
    put(folder, config, tensors, "model.safetensors")


def safeailab_eagle3(head: Head, folder: Path) -> None:
    config = {**layer_of(head), "draft_vocab_size": head.config.draft_vocab_size}
    tensors = renamed(head, layers_0="midlayer") | offsets(head)
    del tensors[EMBED]
    put(folder, config, tensors, "pytorch_model.bin")


def speculators_eagle3(head: Head, folder: Path) -> None:
    config = {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": head.config.draft_vocab_size,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(head.config.hidden_layers),
        "transformer_layer_config": layer_of(head),
    }
    put(folder, config, renamed(head) | offsets(head), "model.safetensors")


def medusa(head: Head, folder: Path) -> None:
    """Each head with an output matrix of its own."""
    tensors = {}
    for number in range(head.config.num_heads):
        for kind in ("weight", "bias"):
            tensors[f"{number}.0.linear.{kind}"] = head.tensors[f"heads.{number}.0.{kind}"]
        tensors[f"{number}.1.weight"] = head.tensors[LM_HEAD] + number
    config = {"medusa_num_heads": head.config.num_heads, "medusa_num_layers": 1}
    put(folder, config, tensors, "medusa_lm_head.pt")


@pytest.mark.parametrize("write", [safeailab_eagle3, speculators_eagle3])
def test_eagle_3_of_both_layouts_is_the_head_that_was_written(
    write: Write, tiny: Path, tmp_path: Path
) -> None:
    head = seeded_head(tiny, "eagle3")
    write(head, tmp_path / "published")
    found = read_head(tmp_path / "published", tiny)
    assert found.config.hidden_layers == (0, 1, 2)
    assert same(found, head)


@pytest.mark.parametrize("write", [safeailab_eagle, speculators_eagle])
def test_eagle_1_of_both_layouts_takes_from_its_target_what_it_lacks(
    write: Write, tiny: Path, tmp_path: Path
) -> None:
    head = seeded_head(tiny, "eagle", num_tokens=320)
    write(head, tmp_path / "published")
    found = read_head(tmp_path / "published", tiny)
    assert found.config.kind == "eagle"
    table = load_file(tiny / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(found.tensors[EMBED], table)
    assert torch.equal(found.tensors[LM_HEAD], table)
    assert same(found, head, without=write is safeailab_eagle)


def test_medusas_own_layout_has_an_output_matrix_for_each_head(tiny: Path, tmp_path: Path) -> None:
    head = seeded_head(tiny, "medusa", num_tokens=320)
    medusa(head, tmp_path / "published")
    found = read_head(tmp_path / "published")
    assert (found.config.num_heads, found.config.num_blocks) == (3, 1)
    assert torch.equal(found.tensors["heads.2.lm_head.weight"], head.tensors[LM_HEAD] + 2)
    assert torch.equal(found.tensors["heads.1.0.bias"], head.tensors["heads.1.0.bias"])


def same(found: Head, head: Head, *, without: bool = False) -> bool:
    lacking = {"embedding_norm.weight", "layers.0.input_layernorm.weight"} if without else set()
    if found.tensors.keys() != head.tensors.keys() - lacking:
        return False
    return all(torch.equal(tensor, head.tensors[name]) for name, tensor in found.tensors.items())


def test_what_is_no_head_or_lacks_a_part_is_said(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds neither head\.json nor config\.json"):
        read_head(tmp_path)
    with pytest.raises(UsageError, match=r"has no fc, and config\.json no medusa_num_heads"):
        read_head(tiny)
    head = seeded_head(tiny, "eagle3")
    safeailab_eagle3(head, tmp_path / "published")
    with pytest.raises(UsageError, match="does not say which hidden states it reads"):
        read_head(tmp_path / "published")
    speculators_eagle3(
        Head(head.config, {**head.tensors, "fc.weight": torch.zeros(96, 96)}), tmp_path / "odd"
    )
    with pytest.raises(QtoolError, match=r"fc.weight has shape \(96, 96\), its config says \(96, 288\)"):
        read_head(tmp_path / "odd")
    speculators_eagle3(Head(head.config, {**head.tensors, "extra.weight": torch.zeros(3)}), tmp_path / "more")
    with pytest.raises(QtoolError, match=r"holds extra.weight, which has no place"):
        read_head(tmp_path / "more")
