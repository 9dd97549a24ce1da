"""Text to tokens and back, and chats to prompts, without importing torch or transformers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer as FastTokenizer

from qtool.errors import QtoolError, UsageError
from qtool.runtime.chat_template import compile_template
from qtool.runtime.request import ParameterError
from qtool.runtime.token_bytes import TokenBytes

Message = Mapping[str, object]


class Tokenizer:
    """The tokenizer of a checkpoint or engine folder; encodes and renders as transformers does.

    Immutable once loaded, so that any thread may use it.
    """

    def __init__(
        self,
        fast: FastTokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        fast.no_truncation()
        fast.no_padding()
        self._fast = fast
        self.special_tokens = dict(special_tokens)
        """Texts of the special tokens that have a role, by its name: `bos_token`, `eos_token` and so on."""
        self.chat_template = chat_template
        """The template's Jinja source."""
        self._template = None if chat_template is None else compile_template(chat_template)
        self.token_bytes = TokenBytes(fast)
        self.showing_special_tokens = _ShowingSpecialTokens(fast)
        """Decodes as the tokenizer does, but special tokens too."""
        self.eos_token_ids = eos_token_ids
        """Tokens that end an answer: generation_config.json's, and the tokenizer's own eos_token."""

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json.

        Of generation_config.json only eos_token_id is taken: temperature and the like stay the API's own
        defaults, so that a request means the same whatever the model. Raises UsageError when there is no such
        folder, QtoolError for a file that is missing or unreadable.
        """
        if not folder.is_dir():
            raise UsageError(f"{folder}: is no folder; give an engine that 'qtool compile' wrote")
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise QtoolError(f"{path}: missing; an engine needs the tokenizer that its checkpoint came with")
        try:
            fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower class
            raise QtoolError(f"{path}: is no tokenizer that can be read ({error})") from error
        config = _read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(
            {**_read_json(folder / "special_tokens_map.json"), **config},
        )
        return cls(
            fast, special_tokens, _chat_template(folder, config), _eos_ids(folder, fast, special_tokens)
        )

    def to_json(self) -> str:
        """The tokenizer as a tokenizer.json."""
        return self._fast.to_str()

    def encode(
        self, text: str, *, add_special_tokens: bool = True, most: int | None = None, param: str = "prompt"
    ) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts around one (often a BOS).

        Raises ParameterError for `param`, before any work, when the text can't fit into `most` tokens.
        """
        longest = self.token_bytes.longest
        if most is not None and longest is not None and (size := len(text.encode())) > most * longest:
            raise ParameterError(
                param, f"is a text of {size} bytes, which can't fit into {most} tokens; shorten it"
            )
        return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._fast.decode(ids)

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is spelled so; None when there is none."""
        token_id = self._fast.token_to_id(text)
        return token_id if token_id is not None and self.decode([token_id]) == "" else None

    def token(self, token_id: int) -> str | None:
        """A token as tokenizer.json spells it; None for an id that the tokenizer doesn't use."""
        return self._fast.id_to_token(token_id)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The prompt that asks for the answer to a chat, or with `continue_final_message` for its last
        message's rest.

        Raises ParameterError when the tokenizer has no chat template or the template refuses the chat.
        """
        if self._template is None:
            raise ParameterError(
                "messages", "this model has no chat template; complete a plain prompt instead"
            )
        # A template tests whether a key is there, and would print the None of one that is there but empty.
        present = [
            {key: value for key, value in message.items() if value is not None} for message in messages
        ]
        try:
            text = self._template.render(
                messages=present,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise ParameterError("messages", f"the model's chat template refuses them: {error}") from error
        return _cut_after(text, str(messages[-1]["content"])) if continue_final_message else text

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        most: int | None = None,
    ) -> list[int]:
        """Token ids of `render_chat`; with `most` as in `encode`.

        The template writes the special tokens, so none is added: one BOS.
        """
        text = self.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.encode(text, add_special_tokens=False, most=most, param="messages")


@dataclass(frozen=True)
class _ShowingSpecialTokens:
    fast: FastTokenizer

    def decode(self, ids: Sequence[int]) -> str:
        return self.fast.decode(ids, skip_special_tokens=False)


def _cut_after(text: str, content: str) -> str:
    """A rendered chat without what the template puts after the last message's content."""
    content = content.strip()  # as templates do
    start = text.rfind(content)
    if not content or start < 0:
        raise ParameterError("continue_final_message", "the last message's text is not in the rendered chat")
    return text[: start + len(content)]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise QtoolError(f"{path}: is not valid JSON ({error}); copy it again from the checkpoint") from error
    if not isinstance(content, dict):
        raise QtoolError(f"{path}: holds a {type(content).__name__}, not an object; copy it again")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The `*_token` entries, by which templates name them; each is a text, or an object that holds one."""
    texts = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            texts[key] = text
    return texts


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def _eos_ids(folder: Path, fast: FastTokenizer, special_tokens: Mapping[str, str]) -> frozenset[int]:
    ids = _read_json(folder / "generation_config.json").get("eos_token_id")
    found = set(ids if isinstance(ids, list) else [] if ids is None else [ids])
    if "eos_token" in special_tokens:
        found.add(fast.token_to_id(special_tokens["eos_token"]))
    return frozenset(found - {None})
