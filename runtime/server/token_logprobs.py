"""Log-probabilities of tokens, as OpenAI's API writes them: one way for completions, another for chats."""

import codecs
from collections.abc import Callable, Sequence

from qtool.runtime.logprobs import TokenLogprobs
from qtool.runtime.server.responses import Json

Bytes = Callable[[int], bytes]
"""The bytes of a token."""


def chat_entry(found: TokenLogprobs, token_bytes: Bytes) -> Json:
    """One element of a chat's `logprobs.content`."""
    top = [_alternative(token, logprob, token_bytes) for token, logprob in found.top]
    return {**_alternative(found.token, found.logprob, token_bytes), "top_logprobs": top}


def _alternative(token: int, logprob: float, token_bytes: Bytes) -> Json:
    raw = token_bytes(token)
    return {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}


class CompletionLogprobs:
    """Writes the `logprobs` of a completion, token by token; offsets count the characters of its text."""

    def __init__(self, token_bytes: Bytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def rows(self, tokens: Sequence[int], found: Sequence[TokenLogprobs | None]) -> Json:
        """The object for these tokens; the very first of a prompt has no log-probability."""
        return {
            "tokens": [self._spell(token) for token in tokens],
            "token_logprobs": [None if one is None else one.logprob for one in found],
            "top_logprobs": [None if one is None else self._top(one) for one in found],
            "text_offset": [self._advance(token) for token in tokens],
        }

    def _top(self, found: TokenLogprobs) -> Json:
        # The token itself is always among them, so there may be one more than was asked for.
        pairs = [*found.top, (found.token, found.logprob)]
        return {self._spell(token): logprob for token, logprob in pairs}

    def _spell(self, token: int) -> str:
        """The token's text; of a token that is no whole text, its bytes, since tops are told apart by it."""
        raw = self._token_bytes(token)
        return raw.decode() if _is_text(raw) else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _advance(self, token: int) -> int:
        """Where the token's text begins: for the rest of a character, where the character does."""
        raw = self._token_bytes(token)
        if self._decoder.getstate()[0] and _is_text(raw):  # what is held will never be a character
            self._offset += len(self._decoder.decode(b"", final=True))
        start = self._offset
        self._offset += len(self._decoder.decode(raw))
        return start


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def merged(parts: Sequence[Json]) -> Json | None:
    """Consecutive `logprobs` of a completion as one; None for none."""
    if not parts:
        return None
    whole: dict[str, list[object]] = {key: [] for key in parts[0]}
    for part in parts:
        for key, values in part.items():
            assert isinstance(values, list)
            whole[key] += values
    return dict(whole)
