"""The HTTP API: its routes, and what lies around them."""

import time
from collections.abc import Callable, Sequence

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import qtool
from qtool.runtime.client import Client
from qtool.runtime.server.embedding_routes import embedding_routes
from qtool.runtime.server.errors import add_error_handlers
from qtool.runtime.server.generation_routes import generation_routes
from qtool.runtime.server.middleware import (
    Handled,
    KeyMiddleware,
    RecordMiddleware,
    SizeMiddleware,
    log_request,
)
from qtool.runtime.server.openapi import describe
from qtool.runtime.server.operations import operations_routes
from qtool.runtime.server.responses import Json
from qtool.runtime.server.service import Service, make_service
from qtool.runtime.server.settings import ServerSettings
from qtool.runtime.server.tokenization import tokenization_routes


def create_app(
    client: Client,
    model: str,
    settings: ServerSettings | None = None,
    observers: Sequence[Callable[[Handled], None]] = (),
) -> ASGIApp:
    """The OpenAI-compatible API over a client whose loop runs, serving it under the name `model`.

    `observers` are told of each request when it has ended; they must be quick and must not raise.
    """
    service = make_service(client, model, settings or ServerSettings())

    def count(handled: Handled) -> None:
        service.metrics.count_request(handled.route, handled.status)

    app = _surround(_routes(service), service.settings)
    return RecordMiddleware(app, (count, log_request, *observers))


def _routes(service: Service) -> FastAPI:
    # FastAPI's own pages of documentation load scripts from elsewhere.
    app = FastAPI(title="qtool", version=qtool.__version__, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    description: Json = {
        "id": service.model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "qtool",
        "max_model_len": service.client.max_tokens_per_sequence,
    }

    @app.get("/v1/models", tags=["models"])
    async def models() -> Json:
        return {"object": "list", "data": [description]}

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def one_model(name: str) -> Json:
        service.refuse_other(name)
        return description

    for routes in (generation_routes, embedding_routes, tokenization_routes, operations_routes):
        app.include_router(routes(service))
    describe(app, service.model)
    return app


def _surround(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    app = SizeMiddleware(app, settings.max_body_bytes)
    if settings.api_keys:
        app = KeyMiddleware(app, settings.api_keys)
    if settings.allow_origins:  # outside the key's check: a browser asks for permission without a key
        app = CORSMiddleware(
            app,
            allow_origins=settings.allow_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    return app
