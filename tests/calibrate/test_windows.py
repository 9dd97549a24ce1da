from pathlib import Path

import pytest
import torch

from qtool.calibrate.text import Record
from qtool.calibrate.windows import (
    calibration_windows,
    load_tokenizer,
    sample_windows,
    sequential_windows,
    tokenize,
)
from qtool.core.recipe import Calibration
from qtool.errors import QtoolError, UsageError

CHAT: Record = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def test_records_follow_one_another_without_special_tokens(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    tokens = tokenize(tokenizer, ["def f(x):", "return x"], chat_template=False)
    assert tokenizer.decode(tokens) == "def f(x):return x"
    assert not set(tokens.tolist()) & set(tokenizer.all_special_ids)


def test_a_chat_is_rendered_with_the_template_or_read_as_its_contents(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    rendered = tokenizer.decode(tokenize(tokenizer, [CHAT, "Bye"], chat_template=True))
    assert rendered == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n"
    )
    assert tokenizer.decode(tokenize(tokenizer, [CHAT], chat_template=False)) == "Hi\nHello"


def test_a_tokenizer_without_template_cannot_render(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="the tokenizer has no chat template"):
        tokenize(tokenizer, [CHAT], chat_template=True)


def test_sampled_windows_are_chosen_by_the_seed_and_never_overlap() -> None:
    tokens = torch.arange(1003)
    one, again, other = (sample_windows(tokens, 5, 100, seed) for seed in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert one.shape == (5, 100)
    assert torch.equal(one - one[:, :1], torch.arange(100).expand(5, 100))
    assert sorted(set(one[:, 0].tolist())) == one[:, 0].tolist()


def test_sequential_windows_start_at_the_text_s_beginning() -> None:
    assert sequential_windows(torch.arange(23), 7, 2).tolist() == [list(range(7)), list(range(7, 14))]


def test_too_little_text_says_how_many_windows_it_makes(tiny: Path) -> None:
    with pytest.raises(UsageError, match="23 tokens, which make 3 windows of 7, wanted 4"):
        sequential_windows(torch.arange(23), 7, 4)
    with pytest.raises(UsageError, match=r"few\.txt: the text has .* make 0 windows of 512, wanted 128"):
        calibration_windows(load_tokenizer(tiny), ["short"], Calibration(dataset="few.txt"))


def test_a_folder_without_tokenizer_is_an_error_that_names_it(tiny_copy: Path) -> None:
    for file in tiny_copy.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(QtoolError, match="copy: holds no tokenizer"):
        load_tokenizer(tiny_copy)
