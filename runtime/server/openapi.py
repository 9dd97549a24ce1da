"""The API's description in OpenAPI, with the errors that are really sent."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response of 400 and above that the API itself sends."""

    error: ErrorDetail


def describe(app: FastAPI, model: str) -> None:
    """Document the model's name, and OpenAI's error object in place of FastAPI's own, which is never sent."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            schemas = schema["components"]["schemas"]
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            for body in schemas.values():
                if "model" in body.get("properties", {}):
                    body["properties"]["model"] = {"type": "string", "enum": [model]}
            for error in (ErrorBody, ErrorDetail):
                described = error.model_json_schema(ref_template="#/components/schemas/{model}")
                described.pop("$defs", None)
                schemas[error.__name__] = described
            for operations in schema["paths"].values():
                for operation in operations.values():
                    operation["responses"].pop("422", None)
                    operation["responses"]["default"] = _ERROR
        return app.openapi_schema or {}

    app.openapi = openapi  # type: ignore[method-assign] # how FastAPI wants it done


_ERROR = {
    "description": "An error",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
}
