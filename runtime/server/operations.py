"""Routes for those who run the server: probes, version and metrics."""

from importlib import resources

from fastapi import APIRouter, Response
from fastapi.responses import HTMLResponse, JSONResponse

import qtool
from qtool.runtime.server.metrics import CONTENT_TYPE
from qtool.runtime.server.responses import Json
from qtool.runtime.server.service import Service


def operations_routes(service: Service) -> APIRouter:
    """/, /health, /ready, /version and /metrics."""
    router = APIRouter(tags=["operations"])
    loop = service.client.loop
    html = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    @router.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        """Load, latencies, cache and a chat, for people."""
        return HTMLResponse(html)

    @router.get("/health", responses={503: {"description": "Loading, stopping, or the engine failed"}})
    async def health() -> JSONResponse:
        """Whether the engine lives: restart the server when this stays 503."""
        if (reason := loop.refusal) is not None:
            return JSONResponse({"status": reason}, 503)
        return JSONResponse({"status": "ok"})

    @router.get("/ready", responses={503: {"description": "Not now"}})
    async def ready() -> JSONResponse:
        """Whether a request would be admitted now: send it elsewhere while this is 503."""
        stats, limits = loop.stats(), loop.scheduler.config
        if (reason := loop.refusal) is not None:
            return JSONResponse({"status": reason}, 503)
        if stats.num_running + stats.num_waiting >= limits.max_num_seqs + limits.max_queue:
            return JSONResponse({"status": "the queue is full"}, 503)
        return JSONResponse({"status": "ready"})

    @router.get("/version")
    async def version() -> Json:
        return {"version": qtool.__version__}

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    return router
