"""The HTTP routes."""

import asyncio
import time
from collections.abc import Sequence

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

import qtool
from qtool.runtime.client import Client
from qtool.runtime.request import ParameterError
from qtool.runtime.server.errors import ModelNotFoundError, add_error_handlers
from qtool.runtime.server.generation import respond
from qtool.runtime.server.protocol import ChatBody, CompletionBody, Prompt
from qtool.runtime.server.responses import Json, Shape


def create_app(client: Client, model: str) -> FastAPI:
    """The OpenAI-compatible API over a client whose loop runs, serving it under the name `model`."""
    app = FastAPI(title="qtool", version=qtool.__version__)
    add_error_handlers(app)
    description: Json = {
        "id": model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "qtool",
        "max_model_len": client.max_tokens_per_sequence,
    }

    def refuse_other(name: str) -> None:
        if name != model:
            raise ModelNotFoundError(f"model {name!r} is not served here; this server has {model!r}")

    @app.get("/health")
    async def health() -> Response:
        if (reason := client.loop.refusal) is not None:
            return JSONResponse({"status": reason}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [description]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Json:
        refuse_other(name)
        return description

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        refuse_other(body.model)
        prompts = await asyncio.to_thread(_token_ids, client, body.prompt)
        params = body.sampling_params(body.max_tokens, client.tokenizer.eos_token_ids)
        shape = Shape("text", model, body.include_usage)
        return await respond(client, request, prompts, params, shape, stream=body.stream)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        refuse_other(body.model)
        messages = [message.for_template() for message in body.messages]
        prompt = await asyncio.to_thread(client.tokenizer.encode_chat, messages)
        max_tokens = body.token_limit
        if max_tokens is None:
            max_tokens = max(1, client.max_tokens_per_sequence - len(prompt))
        params = body.sampling_params(max_tokens, client.tokenizer.eos_token_ids)
        shape = Shape("chat", model, body.include_usage)
        return await respond(client, request, [prompt], params, shape, stream=body.stream)

    return app


def _token_ids(client: Client, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Encode the texts, check the ids: an engine would read past its embeddings."""
    encoded = []
    for prompt in prompts:
        ids = client.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if outside := [token for token in ids if not 0 <= token < client.vocab_size]:
            raise ParameterError("prompt", f"token id {outside[0]} is not in 0 … {client.vocab_size - 1}")
        encoded.append(ids)
    return encoded
