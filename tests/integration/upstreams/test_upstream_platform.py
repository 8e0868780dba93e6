"""Requests in all dialects to upstreams of both protocols, through real processes, and their usage events."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import psycopg
import pytest
import redis

from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from millrace.local.program import free_port
from tests.support.billing.books import rate_card
from tests.support.invariants import assert_ledger_invariants
from tests.support.upstreams.platform import UpstreamPlatform, eventually, upstream_platform
from tests.support.upstreams.protocol_server import USAGE, Answer, ProtocolServer

pytestmark = pytest.mark.timeout(300)
SECRET = "sk-operators-secret"
MODELS = ("gpt", "claude", "vectors", "nested")
ARGUMENTS = '{"city": "Paris"}'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PIXEL = "iVBORw0KGgoAAAANSUhEUg=="
DIALECTS = ("chat", "messages", "responses")
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    server = ProtocolServer()
    yield server
    server.close()


@pytest.fixture
def platform(broker: redis.Redis, database: str, secret: str, server: ProtocolServer) -> Iterator[UpstreamPlatform]:
    for model in MODELS:
        rate_card(model)
    port = free_port()
    timeout = {"MILLRACE_REQUEST_TIMEOUT_SECONDS": "30"}  # less than the pause after a 529
    with upstream_platform(broker, database, secret, {1: SECRET, 2: secret}, port, **timeout) as platform:
        common: dict[str, Any] = {"allow_internal": True, "images": True, "reasoning": True, "context_length": 100_000}
        openai, anthropic = UpstreamEngine.OPENAI, UpstreamEngine.ANTHROPIC
        platform.deploy(
            {
                "gpt": UpstreamSpec(openai, server.url, "gpt-x", "openai", 1, **common),
                "claude": UpstreamSpec(anthropic, server.url, "claude-x", "anthropic", 1, **common),
                "vectors": UpstreamSpec(
                    openai, server.url, "embed-x", "openai", 1, allow_internal=True, task="embed", dimensions=3
                ),
                "nested": UpstreamSpec(openai, f"{platform.url}/v1", "claude", "millrace", 2, **common),
            }
        )
        yield platform


def body_of(dialect: str, model: str, **fields: Any) -> dict[str, Any]:
    """Return a request with a system text, an earlier tool call with its result, and an image."""
    tool = {"name": "weather", "description": "Weather", "parameters": PARAMETERS}
    image = f"data:image/png;base64,{PIXEL}"
    if dialect == "chat":
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
        return {
            "model": model,
            "max_tokens": 2000,
            "messages": [
                {"role": "system", "content": "Be brief"},
                {"role": "user", "content": "Weather?"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "And?"}, {"type": "image_url", "image_url": {"url": image}}],
                },
            ],
            "tools": [{"type": "function", "function": tool}],
            "reasoning_effort": "low",
            **fields,
        }
    if dialect == "messages":
        source = {"type": "base64", "media_type": "image/png", "data": PIXEL}
        return {
            "model": model,
            "max_tokens": 2000,
            "system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "Weather?"},
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Paris"}}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"},
                        {"type": "text", "text": "And?"},
                        {"type": "image", "source": source},
                    ],
                },
            ],
            "tools": [{"name": "weather", "description": "Weather", "input_schema": PARAMETERS}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            **fields,
        }
    return {
        "model": model,
        "max_output_tokens": 2000,
        "instructions": "Be brief",
        "input": [
            {"role": "user", "content": "Weather?"},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": ARGUMENTS},
            {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "And?"}, {"type": "input_image", "image_url": image}],
            },
        ],
        "tools": [{"type": "function", **tool}],
        "reasoning": {"effort": "low"},
        **fields,
    }


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    lines = [line[5:].strip() for line in response.text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def read_answer(
    dialect: str, response: httpx2.Response, *, stream: bool
) -> tuple[str, str, list[Any], tuple[int, int]]:
    """Return the text, the reasoning, the calls and the usage of a response."""
    assert response.status_code == 200, response.text
    found = events(response) if stream else [response.json()]
    if dialect == "chat":
        if not stream:
            message, usage = found[0]["choices"][0]["message"], found[0]["usage"]
            calls = [
                (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])
            ]
            text, reasoning = message["content"] or "", message.get("reasoning_content", "")
            return text, reasoning, calls, (usage["prompt_tokens"], usage["completion_tokens"])
        deltas = [event["choices"][0]["delta"] for event in found if event["choices"]]
        names = [c["function"]["name"] for d in deltas for c in d.get("tool_calls", []) if "name" in c["function"]]
        arguments = "".join(c["function"]["arguments"] for d in deltas for c in d.get("tool_calls", []))
        text = "".join(delta.get("content") or "" for delta in deltas)
        reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
        usage = found[-1]["usage"]
        calls = [(names[0], arguments)] if names else []
        return text, reasoning, calls, (usage["prompt_tokens"], usage["completion_tokens"])
    if dialect == "messages":
        if stream:
            deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
            text = "".join(delta.get("text", "") for delta in deltas)
            reasoning = "".join(delta.get("thinking", "") for delta in deltas)
            arguments = "".join(delta.get("partial_json", "") for delta in deltas)
            starts = [event["content_block"] for event in found if event["type"] == "content_block_start"]
            calls = [(block["name"], arguments) for block in starts if block["type"] == "tool_use"]
            usage = next(event["usage"] for event in found if event["type"] == "message_delta")
        else:
            blocks, usage = found[0]["content"], found[0]["usage"]
            text = "".join(block.get("text", "") for block in blocks)
            reasoning = "".join(block.get("thinking", "") for block in blocks)
            calls = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
        total = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
        return text, reasoning, calls, (total, usage["output_tokens"])
    whole = found[-1]["response"] if stream else found[0]
    items, usage = whole["output"], whole["usage"]
    text = "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"])
    reasoning = "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["content"])
    calls = [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    return text, reasoning, calls, (usage["input_tokens"], usage["output_tokens"])


def check_received(body: dict[str, Any], protocol: str, dialect: str) -> None:
    """Check what the upstream received for `body_of`."""
    if protocol == "claude":
        system, messages = body["system"], body["messages"]
        assert [block["text"] for block in system] == ["Be brief"]
        assert ("cache_control" in system[0]) == (dialect == "messages")
        assert [message["role"] for message in messages] == ["user", "assistant", "user"]
        assert messages[1]["content"][0]["input"] == {"city": "Paris"}
        kinds = [block["type"] for block in messages[2]["content"]]
        assert kinds == ["tool_result", "text", "image"]
        assert messages[2]["content"][2]["source"] == {"type": "base64", "media_type": "image/png", "data": PIXEL}
        assert body["tools"][0]["input_schema"] == PARAMETERS
        assert body["thinking"] == {"type": "enabled", "budget_tokens": 1024}
        assert body["max_tokens"] == 2000
        return
    messages = body["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "user"]
    assert messages[2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": ARGUMENTS.replace(" ", "")} or (
        dialect == "chat" and messages[2]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    )
    assert messages[4]["content"][1] == {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    assert body["tools"][0]["function"]["parameters"] == PARAMETERS
    assert body["reasoning_effort"] == "low"
    assert (body["max_completion_tokens"], len(body["prompt_cache_key"])) == (2000, 32)


def usage_event(database: str, request_id: str) -> dict[str, Any]:
    """Wait for the usage event of a request, and return it."""
    with psycopg.connect(database, autocommit=True, row_factory=psycopg.rows.dict_row) as connection:
        found: list[dict[str, Any]] = []

        def is_settled() -> bool:
            query = "SELECT * FROM billing_usageevent WHERE request_id = %s"
            found[:] = connection.execute(query, (request_id,)).fetchall()
            return bool(found)

        eventually(is_settled)
    (event,) = found
    return event


@pytest.fixture
def system_url(database: str) -> str:
    from tenants.isolation import db_roles

    return db_roles.as_role(database, db_roles.SYSTEM)


def check_dialects(platform: UpstreamPlatform, server: ProtocolServer, system_url: str) -> None:
    client = platform.client
    usage = (USAGE["prompt"], USAGE["output"])
    for protocol in ("gpt", "claude"):
        for dialect in DIALECTS:
            for stream in (False, True):
                server.received.clear()
                server.default = Answer("It is sunny", "Let me think", calls=(("weather", ARGUMENTS),))
                options: dict[str, Any] = {"stream": stream}
                if stream and dialect == "chat":
                    options["stream_options"] = {"include_usage": True}
                response = client.post(PATHS[dialect], json=body_of(dialect, protocol, **options))
                text, reasoning, calls, counted = read_answer(dialect, response, stream=stream)
                context = (protocol, dialect, stream, response.text)
                assert (text, reasoning, counted) == ("It is sunny", "Let me think", usage), context
                assert [(name, json.loads(arguments)) for name, arguments in calls] == [
                    ("weather", json.loads(ARGUMENTS))
                ], context
                check_received(server.received[-1].body, protocol, dialect)
                ignored = response.headers.get("x-millrace-ignored", "")
                assert ("cache_control" in ignored) == (protocol == "gpt" and dialect == "messages"), context
                assert "reasoning" not in ignored, context
                assert "thinking" not in ignored, context
                event = usage_event(system_url, response.headers["x-request-id"])
                assert (event["uncached"], event["cache_read"], event["output"]) == (8, 3, 7), context
                if protocol == "claude" and dialect == "messages":
                    assert "sig-of-the-provider" in response.text

    # Structured output, unknown fields, and what cannot be carried.
    server.default = Answer('{"a": 1}')
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    plain = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 100}
    response = client.post(PATHS["chat"], json={**plain, "model": "claude", "response_format": schema})
    assert response.json()["choices"][0]["message"]["content"] == '{"a": 1}'
    assert server.received[-1].body["output_config"] == {"format": {"type": "json_schema", "schema": SCHEMA}}
    output_config = {"format": {"type": "json_schema", "schema": SCHEMA}}
    response = client.post(PATHS["messages"], json={**plain, "model": "gpt", "output_config": output_config})
    assert response.status_code == 200, response.text
    assert server.received[-1].body["response_format"]["json_schema"]["schema"] == SCHEMA
    response = client.post(PATHS["chat"], json={**plain, "model": "gpt", "new_feature": {"x": 1}})
    assert server.received[-1].body["new_feature"] == {"x": 1}
    assert "x-millrace-ignored" not in response.headers
    response = client.post(PATHS["chat"], json={**plain, "model": "claude", "new_feature": {"x": 1}})
    assert "new_feature" not in server.received[-1].body
    assert response.headers["x-millrace-ignored"] == "new_feature"
    count = len(server.received)
    for fields, param in (
        ({"model": "claude", "seed": 1}, "seed"),
        ({"model": "claude", "n": 2}, "n"),
        ({"model": "claude", "response_format": {"type": "json_object"}}, "response_format"),
        ({"model": "gpt", "top_k": 3}, "top_k"),
        ({"model": "gpt", "logprobs": True}, "logprobs"),
        ({"model": "gpt", "guided_regex": "a+"}, "guided_regex"),
    ):
        response = client.post(PATHS["chat"], json={**plain, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert len(server.received) == count

    # A large body, which a prompt process reads; two choices; completions; vectors; a count; tokens.
    long = {"messages": [{"role": "user", "content": "word " * 4000}], "max_tokens": 10, "model": "gpt", "n": 2}
    response = client.post(PATHS["chat"], json=long)
    assert [choice["message"]["content"] for choice in response.json()["choices"]] == ['{"a": 1}'] * 2
    assert server.received[-1].body["messages"] == long["messages"]
    response = client.post("/v1/completions", json={"model": "gpt", "prompt": ["A", "B"], "max_tokens": 5})
    assert [choice["text"] for choice in response.json()["choices"]] == ['{"a": 1}'] * 2
    response = client.post("/v1/embeddings", json={"model": "vectors", "input": ["a", "b"]})
    assert [each["embedding"] for each in response.json()["data"]] == [[0.0, 0.5, -0.25], [1.0, 0.5, -0.25]]
    event = usage_event(system_url, response.headers["x-request-id"])
    assert (event["uncached"], event["output"]) == (11, 0)
    response = client.post("/v1/messages/count_tokens", json={"model": "gpt", "messages": plain["messages"]})
    assert response.json()["input_tokens"] > 0
    response = client.post("/tokenize", json={"model": "gpt", "messages": plain["messages"]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")

    # A second Millrace: this one, whose model is at the provider.
    server.default = Answer("It is sunny", "Let me think", calls=(("weather", ARGUMENTS),))
    for dialect in DIALECTS:
        response = client.post(PATHS[dialect], json=body_of(dialect, "nested"))
        text, reasoning, calls, counted = read_answer(dialect, response, stream=False)
        assert (text, reasoning, counted) == ("It is sunny", "Let me think", usage), response.text
        assert [name for name, _ in calls] == ["weather"]


def check_faults(platform: UpstreamPlatform, server: ProtocolServer, system_url: str) -> None:
    client = platform.client

    def ask(model: str, **fields: Any) -> httpx2.Response:
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50, **fields}
        return client.post(PATHS["chat"], json=body)

    def check(response: httpx2.Response, status: int, outcome: str) -> dict[str, Any]:
        """Check the status and the settled usage event, then the invariants of billing."""
        assert response.status_code == status, response.text
        event = usage_event(system_url, response.headers["x-request-id"])
        assert event["outcome"] == outcome, response.text
        assert_ledger_invariants(system_url)
        return event

    for model in ("gpt", "claude"):
        # After tokens: an error event, and a failed execution.
        for fault in (Answer(cut_after=5), Answer(malformed_after=5), Answer(error_after=5, error={"type": "x"})):
            server.answers.append(fault)
            response = ask(model, stream=True)
            assert events(response)[-1]["error"]["code"] == "upstream_error", response.text
            assert check(response, 200, "failed")["cost_femto"] == 0
        # Without usage, and with more than was reserved.
        server.answers.append(Answer("x" * 40, usage=None))
        event = check(ask(model), 200, "completed")
        assert (event["output"], event["usage_source"]) == (10, "estimated")
        server.answers.append(Answer(usage={**USAGE, "output": 100_000}))
        event = check(ask(model), 200, "completed")
        assert event["unbilled_tokens"] > 90_000
        assert event["cost_femto"] <= event["reserved_nano"] * 10**6
        # A slow first byte.
        slow = threading.Event()
        threading.Timer(0.7, slow.set).start()
        server.answers.append(Answer(waits=slow))
        assert check(ask(model), 200, "completed")["usage_source"] == "upstream"
        # A rejection, a busy upstream, and one that fails.
        server.answers.append(Answer(status=400, error={"message": "bad field", "param": "tools"}))
        response = ask(model)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "upstream_rejected")
        assert "bad field" in response.text
        limits = {"limit": "10", "remaining": "0", "reset": "80ms"}
        headers = {f"x-ratelimit-{name}-requests": value for name, value in limits.items()}
        for status, more in ((429, headers), (529, {})):
            server.answers.append(Answer(status=status, headers={"retry-after-ms": "50", **more}))
            check(ask(model), 200, "completed")
        server.answers.append(Answer(status=500))
        response = ask(model)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "upstream_error")
        # A client that leaves.
        server.disconnected.clear()
        server.answers.append(Answer("one two three", holds=threading.Event()))
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50, "stream": True}
        with client.stream("POST", PATHS["chat"], json=body) as stream:
            request_id = stream.headers["x-request-id"]
            next(stream.iter_lines())
        assert server.disconnected.wait(30)
        event = usage_event(system_url, request_id)
        assert (event["outcome"], event["output"] > 0) == ("cancelled", True)
        assert_ledger_invariants(system_url)
    server.answers.append(Answer(status=529, headers={"retry-after": "900"}))
    response = ask("gpt")
    assert (response.status_code, response.headers["retry-after"]) == (503, "60")
    count = len(server.received)
    assert ask("gpt").status_code == 503
    assert len(server.received) == count, "the upstream has named the time"
    payloads = [platform.broker.hget(key, "job") or b"" for key in platform.broker.scan_iter("millrace:claim:*")]
    assert payloads
    assert not any(SECRET.encode() in payload for payload in payloads)
    assert_ledger_invariants(system_url)


def test_upstreams(platform: UpstreamPlatform, server: ProtocolServer, system_url: str) -> None:
    """Run both parts with the same processes, whose start takes longer than the requests."""
    check_dialects(platform, server, system_url)
    check_faults(platform, server, system_url)
