"""The tables of all request parameters of `/v1`, from the request types and the vendors' schemas."""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

SPECS = Path(__file__).resolve().parents[1] / "tests" / "data" / "api_specs"
_FILES = {"OpenAI": "openai", "Anthropic": "anthropic_unofficial"}


@dataclass(frozen=True)
class _Endpoint:
    """An endpoint with the tables by which its reader accepts parameters."""

    path: str
    body: type[msgspec.Struct]
    vendor: str
    schema: str
    no_op: Mapping[str, tuple[Any, ...]]
    hints: Collection[str]
    results: Mapping[str, str]  # results that neither the type nor the tables show


def parameters_tables() -> str:
    """Return a table of the parameters for each endpoint."""
    parts = []
    for endpoint in _endpoints():
        rows = "\n".join(f"| `{name}` | {_result(endpoint, name)} |" for name in sorted(_names(endpoint)))
        parts.append(f"## {endpoint.path}\n\n| parameter | result |\n|---|---|\n{rows}\n")
    return "\n".join(parts)


def _endpoints() -> list[_Endpoint]:
    from millrace.gateway.protocols.anthropic import messages
    from millrace.gateway.protocols.openai import parameters as openai
    from millrace.gateway.protocols.openai.chat import ChatBody
    from millrace.gateway.protocols.openai.completions import CompletionBody
    from millrace.gateway.protocols.openai.embeddings import EmbeddingBody
    from millrace.gateway.protocols.responses import body as responses

    functions = dict.fromkeys(("functions", "function_call"), "supported")  # they are converted to tools
    thread = {"thread": "`create` is a hint; `continue` is a 404 `thread_not_found`"}
    openai_tables, message_tables = (openai.NO_OP, openai.HINTS), (messages.NO_OP, messages.HINTS)
    response_tables = (responses.NO_OP, responses.HINTS)
    return [
        _Endpoint("/v1/chat/completions", ChatBody, "OpenAI", "CreateChatCompletionRequest", *openai_tables, functions),
        _Endpoint("/v1/completions", CompletionBody, "OpenAI", "CreateCompletionRequest", *openai_tables, {}),
        _Endpoint("/v1/embeddings", EmbeddingBody, "OpenAI", "CreateEmbeddingRequest", *openai_tables, {}),
        _Endpoint("/v1/responses", responses.ResponseBody, "OpenAI", "CreateResponse", *response_tables, {}),
        _Endpoint("/v1/messages", messages.MessagesBody, "Anthropic", "CreateMessageParams", *message_tables, thread),
    ]


def _names(endpoint: _Endpoint) -> set[str]:
    """Return the endpoint's own and documented parameters, and those of vLLM's that it refuses."""
    fields = {field.name for field in msgspec.structs.fields(endpoint.body)}
    names = fields | _read_fields(endpoint.vendor, endpoint.schema)
    if "guided_json" in fields:
        names |= {name for name in endpoint.no_op if name not in _everywhere(endpoint.vendor)}
    return names


def _result(endpoint: _Endpoint, name: str) -> str:
    if name in endpoint.results:
        return endpoint.results[name]
    if name in {field.name for field in msgspec.structs.fields(endpoint.body)}:
        return "supported"
    if name in endpoint.hints:
        return "hint"
    if name not in endpoint.no_op:
        raise ValueError(f"{endpoint.path}: add the documented parameter {name!r} to the table NO_OP of its reader")
    values = endpoint.no_op[name]
    return "neutral only: " + ", ".join(f"`{json.dumps(value)}`" for value in values) if values else "refused"


@cache
def _schemas(vendor: str) -> dict[str, Any]:
    text = gzip.decompress((SPECS / f"{_FILES[vendor]}.trimmed.openapi.json.gz").read_bytes())
    return dict(json.loads(text)["components"]["schemas"])


def _read_fields(vendor: str, schema: str) -> set[str]:
    found = _schemas(vendor)[schema]
    names: set[str] = set()
    for part in (found, *found.get("allOf", ())):
        names.update(part.get("properties", {}))
        if "$ref" in part:
            names |= _read_fields(vendor, part["$ref"].rpartition("/")[2])
    return names


def _everywhere(vendor: str) -> set[str]:
    return set().union(*(_read_fields(vendor, schema) for schema in _schemas(vendor) if schema.startswith("Create")))
