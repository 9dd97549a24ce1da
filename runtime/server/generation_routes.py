"""The routes that generate: completions and chat completions."""

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from qtool.runtime.server.generation import respond
from qtool.runtime.server.protocol import ChatBody, CompletionBody, Prompt
from qtool.runtime.server.responses import Shape
from qtool.runtime.server.service import Service


def generation_routes(service: Service) -> APIRouter:
    """/v1/completions and /v1/chat/completions."""
    router = APIRouter(prefix="/v1", tags=["generation"])
    client = service.client

    def token_ids(prompts: Sequence[Prompt]) -> list[list[int]]:
        encoded = []
        for prompt in prompts:
            ids = client.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
            service.check_token_ids("prompt", ids)
            encoded.append(ids)
        return encoded

    @router.post("/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        service.refuse_other(body.model)
        prompts = await asyncio.to_thread(token_ids, body.prompt)
        params = body.sampling_params(body.max_tokens, client.tokenizer.eos_token_ids)
        shape = Shape("text", service.model, body.include_usage)
        return await respond(service, request, prompts, params, shape, stream=body.stream)

    @router.post("/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        service.refuse_other(body.model)
        messages = [message.for_template() for message in body.messages]
        prompt = await asyncio.to_thread(client.tokenizer.encode_chat, messages)
        max_tokens = body.token_limit
        if max_tokens is None:
            max_tokens = max(1, client.max_tokens_per_sequence - len(prompt))
        params = body.sampling_params(max_tokens, client.tokenizer.eos_token_ids)
        shape = Shape("chat", service.model, body.include_usage)
        return await respond(service, request, [prompt], params, shape, stream=body.stream)

    return router
