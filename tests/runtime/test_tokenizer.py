"""The thin tokenizer against transformers, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from qtool.errors import QtoolError
from qtool.runtime.chat_template import compile_template
from qtool.runtime.request import ParameterError
from qtool.runtime.tokenizer import Tokenizer

CHATS = [
    [{"role": "user", "content": "Hi there"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve — 你好 <b>&amp;</b>"}],
    [
        {"role": "user", "content": "<|im_end|>\n<|im_start|>system"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "  x\n", "name": None},
    ],
]
TEXTS = ["Hello world", "", "  two  spaces\n\ttab", "<|im_start|>user", "émoji 👩 123456"]


@pytest.fixture(scope="module", params=["tiny", "smollm2"])
def folder(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def test_chats_and_texts_encode_and_decode_as_in_transformers(folder: Path) -> None:
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for chat in CHATS:
        rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.render_chat(chat) == rendered
        ids = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(chat) == ids
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_ids == {theirs.eos_token_id}


def test_a_template_that_writes_the_bos_gets_no_second_one(tokenizer_folder: Path, tmp_path: Path) -> None:
    from tokenizers import processors

    theirs = AutoTokenizer.from_pretrained(tokenizer_folder)
    theirs.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", theirs.bos_token_id)]
    )
    theirs.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    bos = theirs.bos_token_id
    assert ours.encode("ab")[0] == bos
    ids = ours.encode_chat([{"role": "user", "content": "ab"}])
    assert ids == ours.encode("ab")
    assert ids.count(bos) == 1


TEMPLATE = """\
{%- for message in messages %}
    {%- if loop.index0 == 5 %}{% break %}{% endif %}
    {%- generation %}{{ message | tojson }}{% endgeneration %}
{%- endfor %}
{% if tools is not none %}tools{% endif %}
  {% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}
{{ strftime_now("%Y") | length }}{{ messages | tojson(indent=2) }}{{ eos_token }}
"""


def test_a_template_with_every_extension_renders_as_in_transformers(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    theirs = AutoTokenizer.from_pretrained(tokenizer_folder)
    theirs.chat_template = TEMPLATE
    theirs.save_pretrained(tmp_path)
    for chat in CHATS:
        rendered = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert Tokenizer.load(tmp_path).render_chat(chat) == rendered


def write_config(folder: Path, template: object, source: Path) -> Tokenizer:
    """The tokenizer with its template in tokenizer_config.json, as older checkpoints have it."""
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    config = {"chat_template": template, "bos_token": {"content": "<B>"}, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}!",
        [{"name": "tool_use", "template": "?"}, {"name": "default", "template": "{{ bos_token }}!"}],
    ],
)
def test_templates_and_special_tokens_of_older_layouts_are_read(
    template: object, tokenizer_folder: Path, tmp_path: Path
) -> None:
    assert write_config(tmp_path, template, tokenizer_folder).render_chat([]) == "<B>!"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "messages: this model has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "the model's chat template refuses"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ missing.field }}", "undefined"),
    ],
)
def test_a_chat_that_cannot_be_rendered_is_the_clients_error(
    template: str | None, message: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    tokenizer = write_config(tmp_path, template, tokenizer_folder)
    with pytest.raises(ParameterError, match=message):
        tokenizer.render_chat([{"role": "user", "content": "x"}])


def test_a_template_that_is_no_jinja_fails_when_it_is_loaded() -> None:
    with pytest.raises(QtoolError, match="not valid Jinja"):
        compile_template("{% for %}")


@pytest.mark.parametrize(
    ("generation_config", "wanted"),
    [({}, {2}), ({"eos_token_id": 0}, {0, 2}), ({"eos_token_id": [1, 2]}, {1, 2})],
)
def test_end_tokens_come_from_the_generation_config_and_the_tokenizer(
    generation_config: dict[str, object], wanted: set[int], tokenizer_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert write_config(tmp_path, None, tokenizer_folder).eos_token_ids == wanted


def test_a_missing_or_broken_file_is_named(tokenizer_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(QtoolError, match=r"tokenizer\.json: missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(QtoolError, match=r"tokenizer\.json: is no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(QtoolError, match=r"tokenizer_config\.json: holds a list"):
        Tokenizer.load(tmp_path)


def test_the_server_imports_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, qtool.runtime.server.process, qtool.runtime.answer;"
        "print([name for name in ('torch', 'transformers', 'openvino') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
