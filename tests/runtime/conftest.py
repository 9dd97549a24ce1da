"""Tokenizers that need no model."""

from pathlib import Path

import pytest
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from qtool.runtime.tokenizer import Tokenizer
from tests.models import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's byte-level tokenizer, without the model."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture(scope="session")
def spm_tokenizer() -> Tokenizer:
    """Decodes as Llama 2's does: words begin with a mark, and the first one loses its space."""
    words = ["<unk>", "\u2581hello", "\u2581world", "\u2581you"]
    fast = FastTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    fast.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    fast.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581"), "merged_with_next")
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", left=1)]
    )
    return Tokenizer(fast, {}, None, frozenset())
