import json
from pathlib import Path

import pytest

from qtool.calibrate.hub import choose_files, load_hub
from qtool.calibrate.text import digest, load_records
from qtool.errors import QtoolError, UsageError


def test_a_text_file_is_one_record(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Ünïcode,\n\nand a second paragraph.\n", encoding="utf-8")
    assert load_records(str(file)) == ["Ünïcode,\n\nand a second paragraph.\n"]


def test_a_jsonl_file_holds_texts_and_chats(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"text": "one"}, {"messages": chat, "source": 7}]
    file.write_text("\n\n".join(map(json.dumps, rows)))
    assert load_records(str(file)) == ["one", chat]


def test_a_line_of_jsonl_ends_at_a_line_feed_alone_and_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    texts = ["one\u2028two", "three\u2029\x85\x0b\x0c", "four"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    for name, content in (("rows.jsonl", "\r\n".join(lines)), ("text.txt", "four")):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
    assert load_records(str(tmp_path / "rows.jsonl")) == texts
    assert load_records(str(tmp_path / "text.txt")) == ["four"]


@pytest.mark.parametrize(
    "reference",
    ["hub:", "hub:a/b/c", "hub:a/b:c:d:e", "hub:a b", "hub:../x", f"hub:a/{'b' * 100}", "hub:a/b:c:"],
)
def test_a_malformed_reference_to_the_hub_is_an_error_that_names_it(reference: str) -> None:
    with pytest.raises(UsageError, match=reference):
        load_records(reference)


def test_the_builtin_text_is_the_same_every_time_and_apart_from_the_text_to_judge_on() -> None:
    calibration, held_out = load_records("builtin:pydoc"), load_records("builtin:pydoc-test")
    assert digest(calibration) == digest(load_records("builtin:pydoc"))
    assert digest(calibration) != digest(held_out)
    assert not {str(record) for record in calibration} & {str(record) for record in held_out}
    # 128 windows of 512 tokens at 5 characters a token, more than any vocabulary packs into one here.
    assert sum(map(len, calibration)) > 128 * 512 * 5
    assert sum(map(len, held_out)) > 8 * 1024 * 5


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("empty.txt", "", "holds no text"),
        ("blank.txt", " \n\n", "holds no text"),
        ("empty.jsonl", "\n", "holds no records"),
        ("broken.jsonl", '{"text": "a"}\n{"text', "broken.jsonl:2: is not valid JSON"),
        ("number.jsonl", "3", "JSON int"),
        ("other.jsonl", '{"body": "a", "id": 1}', "no text under 'text' or 'messages'; it has body, id"),
        ("roles.jsonl", '{"messages": [{"role": "user"}]}', "messages of role and content"),
        ("deep.jsonl", "[" * 100_000, "deep.jsonl:1: is not valid JSON"),
        ("half.jsonl", r'{"text": "\ud800 abc"}', "half.jsonl:1: has half a surrogate pair"),
        (
            "chat.jsonl",
            r'{"messages": [{"role": "user", "content": "\udc00"}]}',
            "chat.jsonl:1: has half a surrogate pair",
        ),
        ("text.csv", "a,b", "not a dataset reference"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(tmp_path: Path, name: str, content: str, problem: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=name) as error:
        load_records(str(tmp_path / name))
    assert problem in str(error.value)


def test_a_file_that_is_missing_or_binary_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone\.txt: cannot be read"):
        load_records(str(tmp_path / "gone.txt"))
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(UsageError, match=r"binary\.txt: is not UTF-8"):
        load_records(str(tmp_path / "binary.txt"))


def test_an_unknown_builtin_suggests_the_known_one() -> None:
    with pytest.raises(UsageError, match="did you mean 'builtin:pydoc'"):
        load_records("builtin:pydocs")


def test_a_hub_that_cannot_be_reached_is_an_error_that_says_so() -> None:
    with pytest.raises(QtoolError, match="hub:someone/text:train: the hub cannot be reached"):
        load_hub("hub:someone/text:train", endpoint="http://127.0.0.1:9")


def test_the_files_of_a_hub_split_are_of_one_kind_and_in_order() -> None:
    names = ("README.md", "data/train-1.parquet", "data/train-0.parquet", "data/test-0.parquet", "train.txt")
    paths = [Path(name) for name in names]
    assert choose_files("hub:a/b", paths, "train") == [paths[2], paths[1]]
    with pytest.raises(UsageError, match=r"no \.parquet, \.jsonl, \.txt file of split 'dev'"):
        choose_files("hub:a/b:dev", paths, "dev")
