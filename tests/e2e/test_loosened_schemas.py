"""Schemas that are enforced in part, through a whole platform: complete, streamed, over WebSocket and in a batch."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.support.e2e.batches import finished, results, upload
from tests.support.e2e.websocket import socket
from tests.support.stack import MODEL, Stack

HELLO = [{"role": "user", "content": "Numbers?"}]
# Schemas with one value each. It is valid under the first one and invalid under the second one.
VALID: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"const": 5, "maximum": 2**63 - 1}},
    "required": ["n"],
    "additionalProperties": False,
}
INVALID = {**VALID, "not": {"required": ["n"]}}


def chat_format(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}}


def text_format(schema: Any) -> dict[str, Any]:
    return {"input": "Numbers?", "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}


def chat_tool(schema: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    return {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}


def messages_tool(schema: Any) -> dict[str, Any]:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    return {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": choice, "max_tokens": 64}


KINDS: list[tuple[str, Any, str]] = [
    ("/v1/chat/completions", chat_format, "response_format.json_schema.schema"),
    ("/v1/chat/completions", chat_tool, "tools[].function.parameters"),
    ("/v1/responses", text_format, "text.format.schema"),
    ("/v1/messages", messages_tool, "tools[].input_schema"),
]


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    prompt = {} if path == "/v1/responses" else {"messages": HELLO}
    return {"model": MODEL, **prompt, **fields}


@pytest.mark.parametrize(("path", "make", "name"), KINDS)
def test_the_result_is_in_the_header_and_in_the_last_event(stack: Stack, path: str, make: Any, name: str) -> None:
    for schema, valid in ((VALID, True), (INVALID, False)):
        body = body_of(path, make(schema))
        response = httpx2.post(f"{stack.url}{path}", json=body, headers=stack.headers, timeout=60)
        assert response.status_code == 200, response.text
        named = [f"{name}.{keyword}" for keyword in ("maximum", "not")]
        assert response.headers["x-millrace-ignored"].split(", ") == (named[:1] if valid else named)
        assert response.headers["x-millrace-schema-valid"] == str(valid).lower()
        assert response.json()["schema_valid"] is valid
        streamed = httpx2.post(f"{stack.url}{path}", json={**body, "stream": True}, headers=stack.headers, timeout=60)
        datas = [line.removeprefix("data: ") for line in streamed.text.splitlines() if line.startswith("data: {")]
        events = [json.loads(data) for data in datas]
        found = [event.get("schema_valid", event.get("response", {}).get("schema_valid")) for event in events]
        assert [each for each in found if each is not None] == [valid]
        last = -2 if path == "/v1/messages" else -1
        assert found[last] is valid
        event_id = next(line for line in streamed.text.splitlines() if line.startswith("id: ")).removeprefix("id: ")
        resumed = httpx2.get(
            f"{stack.url}/v1/streams/{event_id.partition(':')[0]}",
            headers={**stack.headers, "last-event-id": event_id},
            timeout=60,
        )
        assert f'"schema_valid":{str(valid).lower()}' in resumed.text


def test_the_result_over_websocket_and_in_a_batch(stack: Stack) -> None:
    with socket(stack, additional_headers=stack.headers) as client:
        client.receive()
        client.submit("a", messages=HELLO, max_tokens=64, **chat_format(INVALID))
        messages = client.receive_all("a")
        assert messages[0]["ignored"] == [f"{KINDS[0][2]}.{keyword}" for keyword in ("maximum", "not")]
        assert messages[-2]["chunk"]["schema_valid"] is False
    sdk = stack.client()
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body_of("", chat_format(schema))}
        for name, schema in (("valid", VALID), ("invalid", INVALID))
    ]
    batch = sdk.batches.create(
        input_file_id=upload(sdk, lines), endpoint="/v1/chat/completions", completion_window="24h"
    )
    answers = results(sdk, finished(sdk, batch.id).output_file_id)
    found = {name: answer["response"]["body"]["schema_valid"] for name, answer in answers.items()}
    assert found == {"valid": True, "invalid": False}


def test_a_strict_schema_is_refused_with_the_place_of_the_keyword(stack: Stack) -> None:
    for fields in (chat_format(VALID, strict=True), chat_tool(VALID)):
        if "tools" in fields:
            fields["tools"][0]["function"]["strict"] = True
        for stream in (False, True):
            body = {**body_of("", fields), "stream": stream}
            response = httpx2.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.headers, timeout=60)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (400, "unsupported_schema")
            assert "(at #/properties/n) is not supported" in error["message"]
