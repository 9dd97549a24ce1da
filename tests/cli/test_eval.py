import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Qtool


@pytest.fixture
def few_tokens(tiny_copy: Path) -> Path:
    """A model of 300 tokens beside a tokenizer of 320."""
    weights, config = tiny_copy / "model.safetensors", tiny_copy / "config.json"
    tensors, name = load_file(weights), "model.embed_tokens.weight"
    save_file(tensors | {name: tensors[name][:300].clone()}, weights, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": 300}))
    return tiny_copy


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_when_the_text_has_one(
    qtool: Qtool, few_tokens: Path, tmp_path: Path
) -> None:
    said = "its tokenizer has 320 tokens and its model 300, and the text holds token 3"
    text = tmp_path / "text.txt"
    text.write_text("from transformers import checkpoint, tokenizer, vocabulary\n" * 200)
    ended = qtool("eval", few_tokens, "--baseline", few_tokens, "--window-len", "64", "--dataset", text)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    options = ("--recipe", "awq4", "-o", tmp_path / "out", "--seq-len", "32", "--num-samples", "8")
    ended = qtool("quantize", few_tokens, *options, "--dataset", text)
    assert (ended.code, ended.out) == (2, "")
    assert said in ended.err
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("command", [("eval", "--baseline", "x"), ("run", "hi")], ids=["eval", "run"])
@pytest.mark.parametrize("threads", ["0", "1025", "100000"])
def test_threads_have_a_limit(qtool: Qtool, tiny: Path, command: tuple[str, ...], threads: str) -> None:
    ended = qtool(command[0], tiny, *command[1:], "--threads", threads)
    assert ended.code == 2
    assert "--threads" in ended.err
