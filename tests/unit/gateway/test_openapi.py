"""docs/openapi.yaml agrees with the code and with the API descriptions of both vendors."""

from __future__ import annotations

import gzip
import json
import re
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest

from inference_worker.contract.messages import AnswerEvent, End, Tokens
from inference_worker.contract.request import SAMPLING_PARAMETERS, TokenCounts
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import ResponseSpec, Writer
from millrace.gateway.http.endpoints import batches, feedback, files, message_batches
from millrace.gateway.protocols.anthropic.messages import CountBody, MessagesBody
from millrace.gateway.protocols.anthropic.writer import MessagesWriter
from millrace.gateway.protocols.dialects import ANTHROPIC, OPENAI
from millrace.gateway.protocols.openai.chat import ChatBody
from millrace.gateway.protocols.openai.completions import CompletionBody
from millrace.gateway.protocols.openai.embeddings import EmbeddingBody
from millrace.gateway.protocols.openai.writer import ChatWriter, CompletionWriter
from millrace.gateway.protocols.rerank import RerankBody, ScoreBody
from millrace.gateway.protocols.responses.body import ResponseBody, read_response
from millrace.gateway.protocols.responses.writer import ResponsesWriter
from millrace.gateway.protocols.truncation import TRUNCATION_NAMES
from millrace.gateway.routes import ROUTES
from tools.openapi import document
from tools.openapi.formatting import read_yaml

ROOT = Path(__file__).parents[3]
SPECS = ROOT / "tests" / "data" / "api_specs"
OURS: dict[str, Any] = read_yaml(document.DOCUMENT.read_text(encoding="utf-8"))
EXTENSIONS = {  # not in OpenAI's description; vLLM's names, except `speculation`
    *SAMPLING_PARAMETERS,
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "priority"),
    *("add_special_tokens", "truncate_prompt_tokens", "thinking_token_budget", "speculation"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *TRUNCATION_NAMES,
}
BODIES = [
    ("ChatBody", ChatBody, "openai", "CreateChatCompletionRequest"),
    ("CompletionBody", CompletionBody, "openai", "CreateCompletionRequest"),
    ("EmbeddingBody", EmbeddingBody, "openai", "CreateEmbeddingRequest"),
    ("ResponseBody", ResponseBody, "openai", "CreateResponse"),
    ("BatchBody", batches.BatchBody, "openai", "CreateBatchRequest"),
    ("MessagesBody", MessagesBody, "anthropic", "CreateMessageParams"),
    ("CountBody", CountBody, "anthropic", "CountMessageTokensParams"),
    ("MessageBatchBody", message_batches.MessageBatchBody, "anthropic", "CreateMessageBatchParams"),
    ("RerankBody", RerankBody, None, ""),
    ("ScoreBody", ScoreBody, None, ""),
    ("FeedbackBody", feedback.FeedbackBody, None, ""),
]
STRICT = {"BatchBody", "MessageBatchBody", "FeedbackBody"}  # unknown fields are always refused
# Operation of OpenAI's examples -> our schema that each example must match.
EXAMPLES = {
    "post /chat/completions": "ChatCompletion",
    "post /responses": "Response",
    "get /responses/{response_id}": "Response",
    "delete /files/{file_id}": "FileDeleted",
    "get /models/{model}": "Model",
    "post /batches": "Batch",
    "get /batches": "Batches",
    "get /batches/{batch_id}": "Batch",
    "post /batches/{batch_id}/cancel": "Batch",
}


@cache
def vendor_document(name: str) -> dict[str, Any]:
    file = {"openai": "openai.trimmed", "anthropic": "anthropic_unofficial.trimmed"}[name]
    return dict(in_31(json.loads(gzip.decompress((SPECS / f"{file}.openapi.json.gz").read_bytes()))))


def in_31(node: Any) -> Any:
    """Return a description with OpenAPI 3.0's `nullable` converted to 3.1."""
    if isinstance(node, list):
        return [in_31(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {name: in_31(value) for name, value in node.items()}
    if found.pop("nullable", None) is True:
        return {"anyOf": [found, {"type": "null"}]}
    return found


def check(document: dict[str, Any], schema: str, value: Any) -> None:
    """Check that the value matches the document's schema."""
    wanted = {**document, "$ref": f"#/components/schemas/{schema}"}
    jsonschema_rs.Draft202012Validator(wanted).validate(value)


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [found for value in node.values() for found in references(value)]
    return [found for value in node for found in references(value)] if isinstance(node, list) else []


def fields_of(document: dict[str, Any], schema: str) -> set[str]:
    found = document["components"]["schemas"][schema]
    parts = found.get("allOf", [found])
    own = {name for part in parts for name in part.get("properties", {})}
    return own.union(*(fields_of(document, part["$ref"].rpartition("/")[2]) for part in parts if "$ref" in part))


def test_the_document_is_generated_from_the_code() -> None:
    written = document.DOCUMENT.read_text(encoding="utf-8")
    assert written == document.render(), "docs/openapi.yaml is out of date: run `make docs-openapi`"


def test_a_route_without_a_description_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(document.OPERATIONS, batches.CancelBatch)
    with pytest.raises(ValueError, match="CancelBatch"):
        document.document()


def test_the_document_is_valid() -> None:
    assert OURS["openapi"] == "3.1.0"
    for schema in OURS["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
    for reference in references(OURS):
        node = OURS
        for step in reference.removeprefix("#/").split("/"):
            node = node[step]
    operations = [
        operation for path in OURS["paths"].values() for name, operation in path.items() if name != "parameters"
    ]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    for path, item in OURS["paths"].items():
        for operation in (operation for name, operation in item.items() if name != "parameters"):
            parameters = item.get("parameters", []) + operation.get("parameters", [])
            parameters = [
                OURS["components"]["parameters"][p["$ref"].rpartition("/")[2]] if "$ref" in p else p for p in parameters
            ]
            assert {p["name"] for p in parameters if p["in"] == "path"} == set(re.findall(r"{(\w+)}", path))


def test_the_document_has_exactly_the_routes() -> None:
    routed = {str(route.pattern) for route in ROUTES}
    paths = {re.sub(r"<\w+:(\w+)>", r"{\1}", path) for path in routed if path.startswith("v1/")}
    assert {path.removeprefix("/") for path in OURS["paths"]} == paths


@pytest.mark.parametrize(("name", "body", "vendor", "schema"), BODIES)
def test_request_bodies_agree_with_the_code_and_the_vendor(
    name: str, body: type[msgspec.Struct], vendor: str | None, schema: str
) -> None:
    documented = OURS["components"]["schemas"][name]
    fields = msgspec.structs.fields(body)
    assert set(documented["properties"]) == {field.name for field in fields}
    assert set(documented.get("required", [])) == {field.name for field in fields if field.required}
    assert documented["additionalProperties"] is (name not in STRICT)
    if vendor is not None:
        unknown = set(documented["properties"]) - fields_of(vendor_document(vendor), schema)
        # Completions accept the same parameters as chat completions.
        more = (
            EXTENSIONS | fields_of(vendor_document(vendor), "CreateChatCompletionRequest")
            if name == "CompletionBody"
            else EXTENSIONS
        )
        assert unknown <= (
            more if vendor == "openai" else {"stream_options", "thread", "speculation", "output_format"}
        )  # thread is newer than the schema, and output_format is a name of a beta


def examples() -> list[Any]:
    lines = gzip.decompress((SPECS / "openai_doc_examples.jsonl.gz").read_bytes()).decode().splitlines()
    found = [json.loads(line) for line in lines]
    wanted = [(f"{each['method']} {each['path']}", each["title"], each["response"]) for each in found]
    return [(EXAMPLES[name], title, as_json(text)) for name, title, text in wanted if name in EXAMPLES]


def as_json(text: str) -> str:
    """Parse an example after removing dots and trailing commas, which make some examples invalid JSON."""
    return re.sub(r",(\s*[}\]])", r"\1", re.sub(r",\s*\{ \.\.\. \}", "", text))


def test_there_are_examples() -> None:
    assert {schema for schema, _, _ in examples()} == set(EXAMPLES.values())


@pytest.mark.parametrize(("schema", "title", "text"), examples())
def test_documented_examples_match(schema: str, title: str, text: str) -> None:
    check(OURS, schema, json.loads(text))


EVENTS: list[AnswerEvent] = [
    Tokens("req_1", 1, 0, [1], "Good ", prompt=TokenCounts(uncached=2)),
    Tokens("req_1", 1, 1, [1], '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'),
    End("req_1", 1, 2, "stop", None, TokenCounts(uncached=2, output=2)),
]
ECHOED = read_response(b'{"model": "m", "input": "?", "tools": [{"type": "function", "name": "f"}]}').echoed_parameters
FORM = ResponseSpec("d", "req_1", "m", 1, 2, include_usage=True, tools=["f"], echoed_parameters=ECHOED)
ANY: Any = None


@pytest.mark.parametrize(
    ("writer", "ours", "of_stream", "vendor", "whole", "streamed"),
    [
        (
            ChatWriter,
            "ChatCompletion",
            "ChatCompletionChunk",
            "openai",
            "CreateChatCompletionResponse",
            "CreateChatCompletionStreamResponse",
        ),
        (CompletionWriter, "Completion", "Completion", "openai", "CreateCompletionResponse", None),
        (ResponsesWriter, "Response", "ResponseEvent", "openai", "Response", "ResponseStreamEvent"),
        (MessagesWriter, "Message", "MessageEvent", "anthropic", None, None),
    ],
)
def test_responses_agree_with_our_document_and_the_vendors(
    writer: Any, ours: str, of_stream: str, vendor: str, whole: str | None, streamed: str | None
) -> None:
    made: Writer = writer(FORM, ANY)
    answer = msgspec.json.decode(msgspec.json.encode(made.build_response(EVENTS)))
    check(OURS, ours, answer)
    if whole is not None:
        check(vendor_document(vendor), whole, answer)
    made = writer(FORM, ANY)
    for data in (data for event in EVENTS for data in made.stream(event) if data != b"[DONE]"):
        check(OURS, of_stream, json.loads(data))
        if streamed is not None:
            check(vendor_document(vendor), streamed, json.loads(data))


def test_errors_agree_with_the_document() -> None:
    error = ApiError("invalid_value", "Because.", "x")
    check(OURS, "Error", OPENAI.body(error, "req_1"))
    check(OURS, "AnthropicError", ANTHROPIC.body(error, "req_1"))
    check(vendor_document("openai"), "ErrorResponse", OPENAI.body(error, "req_1"))
    check(vendor_document("anthropic"), "ErrorResponse", ANTHROPIC.body(error, "req_1"))


def test_files_agree_with_the_document() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    row = {"name": "file-1", "size": 1, "created_at": at, "expires_at": at, "filename": "a", "purpose": "batch"}
    response = files.file_object(row)
    check(OURS, "File", response)
    check(
        vendor_document("openai"), "OpenAIFile", {name: value for name, value in response.items() if value is not None}
    )
