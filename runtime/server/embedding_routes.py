"""The route that embeds: pooled hidden states, computed by the engine loop beside what is generated."""

import asyncio
import base64
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from qtool.runtime.client import Client
from qtool.runtime.engines.contract import Floats
from qtool.runtime.request import ParameterError, RequestOptions, refuse_ids_outside
from qtool.runtime.server.completion_body import Prompt
from qtool.runtime.server.disconnect import CLIENT_CLOSED_REQUEST, ClientGoneError, unless_gone
from qtool.runtime.server.embedding_body import EmbeddingBody
from qtool.runtime.server.generation import request_timeout
from qtool.runtime.server.middleware import RequestRecord
from qtool.runtime.server.responses import Json
from qtool.runtime.server.service import Service


def embedding_routes(service: Service) -> APIRouter:
    """/v1/embeddings."""
    router = APIRouter(prefix="/v1", tags=["embeddings"])

    @router.post("/embeddings")
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        service.refuse_other(body.model)
        ids = await asyncio.to_thread(_token_ids, service.client, body.input)
        options = RequestOptions(
            cache_salt=body.cache_salt,
            priority=body.priority,
            timeout_s=request_timeout(service, request, body.timeout),
            pooling=body.pooling,
        )
        record: RequestRecord = request.state.record
        record.fields["prompt_tokens"] = count = sum(map(len, ids))
        service.metrics.prompt_tokens.inc(count)
        try:
            vectors = await unless_gone(request, service.client.embed(ids, options))
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return JSONResponse(_answer(service.model, body, count, vectors))

    return router


def _token_ids(client: Client, prompts: Sequence[Prompt]) -> list[list[int]]:
    most, encoded = client.max_tokens_per_sequence, []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = client.tokenizer.encode(prompt, most=most, param="input")
        else:
            refuse_ids_outside("input", prompt, client.vocab_size)
            ids = prompt
        if not 1 <= len(ids) <= most:
            raise ParameterError("input", f"makes {len(ids)} tokens, wanted 1 to {most}; send a shorter text")
        encoded.append(ids)
    return encoded


def _answer(model: str, body: EmbeddingBody, count: int, vectors: Sequence[Floats]) -> Json:
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _written(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ],
        "model": model,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def _written(vector: Floats, encoding_format: str) -> str | list[float]:
    """A vector as JSON numbers, or its little-endian float32 bytes in base64."""
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return [float(value) for value in vector]
