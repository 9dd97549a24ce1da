"""Routes that turn text into the model's tokens and back, so that clients need no tokenizer of their own."""

import asyncio

from fastapi import APIRouter
from pydantic import model_validator

from qtool.runtime.request import ParameterError, refuse_ids_outside
from qtool.runtime.server.chat_body import ChatMessage
from qtool.runtime.server.protocol import Body
from qtool.runtime.server.responses import Json
from qtool.runtime.server.service import Service


class TokenizeBody(Body):
    """POST /tokenize: a prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    """Only for a prompt: a chat template writes its own."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeBody":
        if (self.prompt is None) == (self.messages is None):
            raise ParameterError("prompt", "is wanted, or messages; send one of them")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


def tokenization_routes(service: Service) -> APIRouter:
    """/tokenize, /detokenize and /tokenizer_info, as lm-eval's remote tokenizer asks for them."""
    router = APIRouter(tags=["tokenization"])
    tokenizer = service.client.tokenizer

    def encode(body: TokenizeBody) -> list[int]:
        if body.messages is not None:
            return tokenizer.encode_chat([message.for_template() for message in body.messages])
        return tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> Json:
        service.refuse_other(service.model if body.model is None else body.model)
        ids = await asyncio.to_thread(encode, body)
        strings = [tokenizer.token(token) for token in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": service.client.max_tokens_per_sequence,
            "tokens": ids,
            "token_strs": strings,
        }

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> Json:
        service.refuse_other(service.model if body.model is None else body.model)
        refuse_ids_outside("tokens", body.tokens, service.client.vocab_size)
        text = await asyncio.to_thread(tokenizer.showing_special_tokens.decode, body.tokens)
        return {"prompt": text}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Json:
        """Special tokens and the chat template, named as in tokenizer_config.json."""
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": service.client.max_tokens_per_sequence,
            **tokenizer.special_tokens,
            "chat_template": tokenizer.chat_template,
        }

    return router
