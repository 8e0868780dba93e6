"""The unmodified anthropic SDK against the running platform."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import anthropic
import httpx2
import pytest
from anthropic.types import Message

from tests.support.e2e.keys import make_key
from tests.support.stack import MODEL, Stack, eventually

FRANCE = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "get_weather",
    "description": "Tells the weather at a place.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}
GREEDY: Any = {"extra_body": {"temperature": 0}}  # no longer a parameter of the SDK
WORDS = "Answer briefly. " + "apple pear plum cherry quince " * 30


class Sdk:
    """The SDK's two clients with one interface. A stream is returned as its final message."""

    def __init__(self, stack: Stack, kind: str) -> None:
        self.kind = kind
        self.options: dict[str, Any] = {"base_url": stack.url, "api_key": stack.key, "max_retries": 0}

    def create(self, **options: Any) -> Any:
        return self._call("create", {"max_tokens": 12, **GREEDY, **options})

    def stream(self, **options: Any) -> Message:
        """Return the message that the SDK builds from the stream's events."""
        options = {"model": MODEL, "messages": FRANCE, "max_tokens": 12, **GREEDY, **options}
        if self.kind == "sync":
            with anthropic.Anthropic(**self.options) as client, client.messages.stream(**options) as stream:
                return stream.get_final_message()

        async def call() -> Message:
            async with anthropic.AsyncAnthropic(**self.options) as client, client.messages.stream(**options) as stream:
                return await stream.get_final_message()

        return asyncio.run(call())

    def count(self, **options: Any) -> int:
        return int(self._call("count_tokens", options).input_tokens)

    def _call(self, method: str, options: dict[str, Any]) -> Any:
        options = {"model": MODEL, "messages": FRANCE, **options}
        if self.kind == "sync":
            with anthropic.Anthropic(**self.options) as client:
                return getattr(client.messages, method)(**options)

        async def call() -> Any:
            async with anthropic.AsyncAnthropic(**self.options) as client:
                return await getattr(client.messages, method)(**options)

        return asyncio.run(call())


@pytest.fixture(params=["sync", pytest.param("async", marks=pytest.mark.slow)])
def sdk(stack: Stack, request: pytest.FixtureRequest) -> Sdk:
    return Sdk(stack, request.param)


def prompt_tokens(message: Message) -> int:
    usage = message.usage
    return usage.input_tokens + (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)


def test_a_message_is_completed_and_metered(stack: Stack) -> None:
    client = anthropic.Anthropic(base_url=stack.url, api_key=stack.key, max_retries=0)
    raw = client.messages.with_raw_response.create(model=MODEL, messages=FRANCE, max_tokens=30, **GREEDY)  # type: ignore[arg-type]
    message = raw.parse()
    assert "Paris" in message.content[0].text  # type: ignore[union-attr]
    assert (message.stop_reason, message.stop_sequence, message.usage.service_tier) == ("end_turn", None, "standard")
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    event = stack.event(raw.headers["request-id"])
    assert (event["input"], event["output"]) == (prompt_tokens(message), message.usage.output_tokens)


@pytest.mark.parametrize("sdk", ["sync", "async"], indirect=True)
def test_a_stream_contains_the_same_message(sdk: Sdk) -> None:
    whole, streamed = sdk.create(), sdk.stream()
    assert streamed.content[0].text == whole.content[0].text  # type: ignore[union-attr]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert prompt_tokens(streamed) == prompt_tokens(whole)


def test_events_are_named_by_their_types(stack: Stack) -> None:
    body = {"model": MODEL, "messages": FRANCE, "max_tokens": 3, "stream": True}
    response = httpx2.post(f"{stack.url}/v1/messages", json=body, headers=stack.headers, timeout=60)
    names = []
    for block in response.text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        assert fields["event"] == json.loads(fields["data"])["type"]
        names.append(fields["event"])
    assert (names[:2], names[-3:]) == (
        ["message_start", "content_block_start"],
        ["content_block_stop", "message_delta", "message_stop"],
    )


def test_a_stream_resumes_with_anthropics_events(stack: Stack) -> None:
    body = {"model": MODEL, "messages": FRANCE, "max_tokens": 8, "stream": True}
    response = httpx2.post(f"{stack.url}/v1/messages", json=body, headers=stack.headers, timeout=60)
    name, events = response.headers["request-id"], response.text.split("\n\n")
    resumed = httpx2.get(
        f"{stack.url}/v1/streams/{name}", headers={**stack.headers, "last-event-id": f"{name}:2"}, timeout=60
    )
    assert resumed.text.split("\n\n") == events[3:]


def test_a_stop_sequence_ends_the_message(sdk: Sdk) -> None:
    message = sdk.create(stop_sequences=["Paris"], max_tokens=30)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in message.content[0].text


def test_a_tool_is_called_and_its_result_accepted(sdk: Sdk) -> None:
    asked = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 60}
    for message in (sdk.create(**asked), sdk.stream(**asked)):
        (use,) = [block for block in message.content if block.type == "tool_use"]
        assert (message.stop_reason, use.name) == ("tool_use", "get_weather")
        assert use.input["place"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny"}
    messages = [*FRANCE, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert sdk.create(messages=messages, tools=[WEATHER]).usage.output_tokens > 0


def test_a_message_follows_its_schema(sdk: Sdk) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    schema["additionalProperties"] = False
    message = sdk.create(output_config={"format": {"type": "json_schema", "schema": schema}}, max_tokens=40)
    assert json.loads(message.content[0].text)["n"] <= 9


@pytest.mark.parametrize("sdk", ["sync", "async"], indirect=True)
def test_count_tokens_equals_the_billed_input_tokens(sdk: Sdk) -> None:
    for fields in (
        {},
        {"system": "Be brief."},
        {"system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}], "tools": [WEATHER]},
    ):
        assert sdk.count(**fields) == prompt_tokens(sdk.create(max_tokens=1, **fields))


def usage(sdk: Sdk, system: str, **options: Any) -> tuple[int, int, int, int]:
    """Return the tokens that were uncached, written for 5 minutes, written for an hour, and read."""
    parts = [
        {"type": "text", "text": text, "cache_control": mark}
        for text, mark in zip(system.split("|"), options.pop("marks"), strict=True)
    ]
    send_failing = sdk.create(system=parts, max_tokens=1, **options).usage
    made = send_failing.cache_creation
    assert send_failing.cache_creation_input_tokens == made.ephemeral_5m_input_tokens + made.ephemeral_1h_input_tokens
    return (
        send_failing.input_tokens,
        made.ephemeral_5m_input_tokens,
        made.ephemeral_1h_input_tokens,
        send_failing.cache_read_input_tokens,
    )


SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def test_the_first_call_writes_the_cache_and_later_calls_read_it(sdk: Sdk) -> None:
    system = f"{sdk.kind} {time.time()} {WORDS}"
    _, short, long, read = usage(sdk, system, marks=[SHORT])
    assert short > 100
    assert (long, read) == (0, 0)
    again = usage(sdk, system, marks=[SHORT])
    assert again[1:3] == (0, 0)
    assert again[3] >= short
    other = [{"role": "user", "content": "And of Italy, then?"}]
    _, short_again, _, read_again = usage(sdk, system, marks=[SHORT], messages=other)
    assert (short_again, read_again) == (0, short)


def test_two_breakpoints_cache_two_prefixes(sdk: Sdk) -> None:
    system = f"{sdk.kind} {time.time()} {WORDS}|{WORDS}"
    _, short, long, read = usage(sdk, system, marks=[LONG, SHORT])
    assert short > 100
    assert long > 100
    assert read == 0
    _, short_again, long_again, read_again = usage(sdk, system + " And kindly.", marks=[LONG, SHORT])
    assert (long_again, read_again >= long) == (0, True)
    assert short_again < short + 32


def test_changed_tools_invalidate_the_cached_prompt(sdk: Sdk) -> None:
    system = f"{sdk.kind} {time.time()} {WORDS}"
    tool = {**WEATHER, "description": f"{system[:20]} tells the weather."}
    _, short, _, _ = usage(sdk, system, marks=[SHORT], tools=[tool])
    other = {**WEATHER, "description": f"{system[:20]} says how the weather is."}
    _, short_again, _, read_again = usage(sdk, system, marks=[SHORT], tools=[other])
    assert (short_again, read_again < short_again) == (pytest.approx(short, abs=32), True)


def test_the_beta_client_and_the_batches_api_are_supported(stack: Stack) -> None:
    client = anthropic.Anthropic(base_url=stack.url, api_key=stack.key, max_retries=0)
    assert client.beta.messages.create(model=MODEL, messages=FRANCE, max_tokens=3).content  # type: ignore[arg-type]
    with pytest.raises(anthropic.NotFoundError) as exc_info:
        client.messages.batches.retrieve("msgbatch_none")
    assert exc_info.value.type == "not_found_error"


def refused(stack: Stack, kind: str, *, key: str | None = None, **options: Any) -> tuple[anthropic.APIStatusError, int]:
    """Return the exception that the SDK raised and the number of requests it sent, with its own retries."""
    sdk, sent = Sdk(stack, kind), 0
    transport = anthropic._client.httpx2

    def count(_: object) -> None:
        nonlocal sent
        sent += 1

    async def count_async(_: object) -> None:
        count(_)

    if kind == "sync":
        sdk.options["http_client"] = transport.Client(event_hooks={"request": [count]})
    else:
        sdk.options["http_client"] = transport.AsyncClient(event_hooks={"request": [count_async]})
    sdk.options |= {"max_retries": 1, "api_key": key or stack.key}
    with pytest.raises(anthropic.APIStatusError) as exc_info:
        sdk.create(**options)
    body: Any = exc_info.value.body
    assert (body["type"], body["request_id"]) == ("error", exc_info.value.request_id)
    return exc_info.value, sent


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_errors_raise_the_sdks_exceptions(stack: Stack, kind: str) -> None:
    def send_failing(**options: Any) -> tuple[type, str | None, int]:
        api_error, sent = refused(stack, kind, **options)
        return type(api_error), api_error.type, sent

    bad = (anthropic.BadRequestError, "invalid_request_error", 1)
    assert send_failing(extra_body={"temperature": 3}) == bad
    assert send_failing(max_tokens=20_000) == bad
    assert send_failing(extra_body={"n": 2}) == bad
    assert send_failing(extra_headers={"anthropic-version": "2020-01-01"}) == bad
    assert send_failing(model="claude") == (anthropic.NotFoundError, "not_found_error", 1)
    assert send_failing(key="sk-mr-unknown") == (anthropic.AuthenticationError, "authentication_error", 1)
    large = [{"role": "user", "content": "x" * (9 << 20)}]
    assert send_failing(messages=large) == (anthropic.RequestTooLargeError, "request_too_large", 1)
    elsewhere = make_key(stack, f"{kind} elsewhere", allowed_models=["another"])
    assert send_failing(key=elsewhere) == (anthropic.PermissionDeniedError, "permission_error", 1)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_limits_are_sent_in_anthropics_headers(stack: Stack, kind: str) -> None:
    key = make_key(stack, f"{kind} one a day", {"requests_per_day": 1, "input_tokens_per_day": 10_000})
    sdk = Sdk(stack, kind)
    sdk.options["api_key"] = key
    eventually(lambda: sdk.create(max_tokens=1).content is not None)
    api_error, sent = refused(stack, kind, key=key)
    assert (type(api_error), api_error.type, sent) == (anthropic.RateLimitError, "rate_limit_error", 1)
    headers = api_error.response.headers
    assert headers["anthropic-ratelimit-requests-limit"] == "1"
    assert headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert headers["anthropic-ratelimit-requests-reset"].endswith("Z")
    assert headers["anthropic-ratelimit-input-tokens-limit"] == "10000"
    assert headers["x-should-retry"] == "false"
    assert int(headers["retry-after"]) > 60
    assert headers["x-ratelimit-remaining-requests"] == "0"


ENDLESS = {"type": "json_schema", "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 900}}


@pytest.mark.parametrize(
    ("path", "body", "kinds"),
    [
        (
            "messages",
            {"messages": FRANCE, "max_tokens": 2000, "output_config": {"format": ENDLESS}},
            ["message_start", "content_block_start"],
        ),
        (
            "responses",
            {"input": "?", "max_output_tokens": 2000, "text": {"format": {"name": "n", **ENDLESS}}},
            ["response.created"],
        ),
    ],
)
def test_a_failed_stream_ends_with_anthropics_error_event(
    stack: Stack, path: str, body: dict[str, Any], kinds: list[str]
) -> None:
    secret = make_key(stack, f"{path} for a moment")
    body = {"model": MODEL, "stream": True, "tools": None, **body}
    with httpx2.stream(
        "POST", f"{stack.url}/v1/{path}", json=body, headers={"x-api-key": secret}, timeout=60
    ) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        events = [json.loads(next(lines).removeprefix("data: ")) for _ in range(5)]
        assert [event["type"] for event in events[: len(kinds)]] == kinds
        revoke(stack, f"{path} for a moment", secret)
        events += [json.loads(line.removeprefix("data: ")) for line in lines]
    last = events[-1]
    assert last["type"] == "error"
    if path == "messages":
        assert last["error"]["type"] == "authentication_error"
        assert last["request_id"] == response.headers["request-id"]
    else:
        assert (last["code"], last["sequence_number"]) == ("invalid_api_key", len(events) - 1)


def revoke(stack: Stack, name: str, secret: str) -> None:
    keys = httpx2.get(f"{stack.url}/api/keys", headers=stack.headers, timeout=60).json()["results"]
    (id_,) = [key["id"] for key in keys if key["name"] == name and secret.startswith(key["prefix"])]
    assert httpx2.delete(f"{stack.url}/api/keys/{id_}", headers=stack.headers, timeout=60).status_code == 204
