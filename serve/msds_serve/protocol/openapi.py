"""The OpenAPI 3.1 document of the service. Requests come from the tables that parse them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msds_serve.protocol.fields import (
    Limits,
    Table,
    chat_table,
    completion_table,
    detokenize_table,
    tokenize_table,
)
from msds_serve.protocol.kinds import Schema, nullable
from msds_serve.protocol.schemas import RESPONSES

_MEANING = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "No such model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "The queue is full; see Retry-After.",
    500: "The server failed.",
    503: "The server is starting, draining or stalled.",
    504: "The request took too long.",
}


def openapi(*, version: str, models: Sequence[str], limits: Limits | None = None, keys: bool = False) -> dict[str, Any]:
    """The document. models: served names, the legal values of `model`. keys: whether an API key is asked for."""
    limits = limits or Limits()
    tables = {
        "ChatRequest": chat_table(limits),
        "CompletionRequest": completion_table(limits),
        "TokenizeRequest": tokenize_table(),
        "DetokenizeRequest": detokenize_table(limits),
    }
    requests = {name: body_schema(table) for name, table in tables.items()}
    for schema in requests.values():
        legal = list(models) if "model" in schema.get("required", ()) else [*models, None]
        schema["properties"]["model"]["enum"] = legal
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "msds",
            "version": version,
            "description": "DeepSeek and its relatives behind OpenAI's API.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": _paths(),
        "components": {"schemas": requests | RESPONSES},
    }
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def body_schema(table: Table) -> Schema:
    """The JSON Schema of a request body: supported, ignored and refused fields, each with its reason."""
    properties: dict[str, Any] = {}
    for name, entry in table.supported.items():
        schema = entry.kind.schema if entry.required else nullable(entry.kind.schema)
        properties[name] = schema | {"description": entry.doc}
    for name, ignored in table.ignored.items():
        properties[name] = nullable(ignored.kind.schema) | {
            "description": f"Accepted without effect: {ignored.reason}.",
            "x-ignored": True,
        }
    for name, refused in table.refused.items():
        properties[name] = {
            "enum": [None, *refused.neutral],
            "description": f"Not supported: {refused.reason}.",
            "x-refused": True,
        }
    required = [name for name, entry in table.supported.items() if entry.required]
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return schema | ({"required": required} if required else {})


def _paths() -> dict[str, Any]:
    failures = (400, 404, 408, 413, 415, 429, 500, 503, 504)
    return {
        "/v1/chat/completions": _post(
            "Answer a conversation.", "ChatRequest", "ChatCompletion", failures, chunk="ChatCompletionChunk"
        ),
        "/v1/completions": _post(
            "Continue texts or token ids.", "CompletionRequest", "Completion", failures, chunk="Completion"
        ),
        "/tokenize": _post(
            "Token ids of a text, or of a conversation.", "TokenizeRequest", "Tokenized", (400, 404, 408, 413, 415)
        ),
        "/detokenize": _post("Text of token ids.", "DetokenizeRequest", "Detokenized", (400, 404, 408, 413, 415)),
        "/v1/models": _get("The served models.", "ModelList"),
        "/v1/models/{model}": _get("One served model.", "Model", 404)
        | {
            "parameters": [
                {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            ]
        },
        "/version": _get("Version of msds.", "Version"),
        "/health": _get("Whether the process runs.", "Status"),
        "/ready": _get("Whether the model is warmed up and stepping.", "Status", 503),
        "/metrics": {
            "get": {
                "summary": "Prometheus metrics.",
                "responses": {"200": {"description": "Metrics.", "content": {"text/plain": {}}}},
            }
        },
    }


def _post(
    summary: str, request: str, response: str, failures: Sequence[int], *, chunk: str | None = None
) -> dict[str, Any]:
    content = _json(response)
    if chunk is not None:  # the schema is that of the data of one event; the last event's data is [DONE]
        content["text/event-stream"] = {"schema": {"$ref": f"#/components/schemas/{chunk}"}}
    responses = {"200": {"description": "Done.", "content": content}}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": True, "content": _json(request)},
            "responses": responses | _failures(401, *failures),
        }
    }


def _get(summary: str, response: str, *failures: int) -> dict[str, Any]:
    responses = {"200": {"description": "Done.", "content": _json(response)}}
    return {"get": {"summary": summary, "responses": responses | _failures(401, *failures)}}


def _json(name: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}


def _failures(*statuses: int) -> dict[str, Any]:
    return {
        str(status): {"description": _MEANING[status], "content": _json("Error")} for status in sorted(set(statuses))
    }
