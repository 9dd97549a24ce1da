"""Every refusal and failure as OpenAI's error object."""

import http
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from qtool.errors import QtoolError, UsageError
from qtool.runtime.failures import (
    DeadlineExceededError,
    NotAdmittingError,
    NoTokenLeftError,
    OverloadedError,
)
from qtool.runtime.request import ParameterError

_RETRY_AFTER_S = 1.0


class ModelNotFoundError(UsageError):
    """A request names a model that is not served here."""


def error_object(message: str, status: int, param: str | None = None) -> dict[str, object]:
    """The body of a response that carries an error."""
    kind = "invalid_request_error" if status < http.HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    code = "model_not_found" if param == "model" and status == http.HTTPStatus.NOT_FOUND else None
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_parts(error: QtoolError) -> tuple[int, dict[str, object], dict[str, str]]:
    """Status, body and headers: 404 for an unknown model, 400 for what the client can mend, 503 or 504 for
    what time may, else 500.
    """
    if isinstance(error, ModelNotFoundError):
        return 404, error_object(str(error), 404, "model"), {}
    if isinstance(error, NoTokenLeftError):
        return 400, error_object(str(error), 400), {}
    if isinstance(error, UsageError):
        param = error.param if isinstance(error, ParameterError) else None
        return 400, error_object(str(error), 400, param), {}
    if isinstance(error, NotAdmittingError):
        seconds = error.retry_after_s if isinstance(error, OverloadedError) else _RETRY_AFTER_S
        return 503, error_object(str(error), 503), {"Retry-After": str(math.ceil(seconds))}
    status = 504 if isinstance(error, DeadlineExceededError) else 500
    return status, error_object(str(error), status), {}


def error_response(error: QtoolError) -> JSONResponse:
    """An error as a response."""
    status, body, headers = error_parts(error)
    return JSONResponse(body, status, headers)


async def answer_loading(scope: Scope, receive: Receive, send: Send) -> None:
    """The whole application while the model loads."""
    response = error_response(NotAdmittingError("the model is being loaded; try again soon"))
    await response(scope, receive, send)


def add_error_handlers(app: FastAPI) -> None:
    """Answer the app's exceptions with error objects."""

    @app.exception_handler(QtoolError)
    async def qtool_error(_: Request, error: QtoolError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid_body(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            message = f"the body is not valid JSON: {first['ctx']['error']}"
            return JSONResponse(error_object(message, 400), 400)
        param, problem = first_problem({**first, "loc": first["loc"][1:]})
        message = problem if param is None else f"{param}: {problem}"
        return JSONResponse(error_object(message, 400, param), 400)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(error_object(message, error.status_code), error.status_code, error.headers)

    @app.exception_handler(RecursionError)
    async def too_deep(_: Request, error: RecursionError) -> JSONResponse:
        return JSONResponse(error_object("the body is nested too deeply; send a flatter one", 400), 400)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_object(f"internal error: {type(error).__name__}", 500), 500)


def first_problem(detail: Mapping[str, Any]) -> tuple[str | None, str]:
    """The field, as `messages[0].role` for ("messages", 0, "role"), and what is wrong with it."""
    path = ""
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or None, detail["msg"]
