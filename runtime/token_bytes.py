"""The bytes that a token stands for, of which several may make one character."""

import json
import re
from collections.abc import Iterator, Mapping

from tokenizers import Tokenizer as FastTokenizer

_WORD_START = "\u2581"
_BYTE = re.compile("<0x([0-9A-F]{2})>")


class TokenBytes:
    """Looks up tokens' bytes. As text, a token that is part of a character would be U+FFFD."""

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        self._added = {key: token.content for key, token in fast.get_added_tokens_decoder().items()}
        kinds = set(_decoder_kinds(json.loads(fast.to_str())["decoder"]))
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        spells_bytes = self._alphabet is not None or self._byte_fallback
        self.longest = max(len(token.encode()) for token in fast.get_vocab()) if spells_bytes else None
        """No token stands for more bytes of a text; None where an unknown token may stand for any number."""

    def __call__(self, token_id: int) -> bytes:
        """The token's bytes; none for an id that the tokenizer doesn't use."""
        if token_id in self._added:
            return self._added[token_id].encode()
        text = self._fast.id_to_token(token_id)
        if text is None:
            return b""
        if self._alphabet is not None:
            return bytes(self._alphabet[char] for char in text)
        if self._byte_fallback and (found := _BYTE.fullmatch(text)):
            return bytes([int(found[1], 16)])
        return text.replace(_WORD_START, " ").encode()


def byte_alphabet() -> Mapping[str, int]:
    """How byte-level tokenizers spell bytes: a visible character as itself, the others from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in visible]
    spelled = {chr(byte): byte for byte in visible}
    return spelled | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}


def _decoder_kinds(decoder: dict[str, object] | None) -> Iterator[str]:
    if decoder is None:
        return
    yield str(decoder["type"])
    inner = decoder.get("decoders", [])
    assert isinstance(inner, list)
    for part in inner:
        yield from _decoder_kinds(part)
