"""Every documented error as the openai SDK raises it, and which errors it retries."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import httpx2
import openai
import pytest

from tests.support.e2e.keys import make_key
from tests.support.stack import MODEL, Stack, eventually

HELLO = [{"role": "user", "content": "Hello"}]
Send = Callable[..., tuple[openai.APIStatusError, int]]


@pytest.fixture(params=["sync", pytest.param("async", marks=pytest.mark.slow)])
def send(stack: Stack, request: pytest.FixtureRequest) -> Send:
    """Send a failing chat completion with the SDK's retries; return the exception and the number of requests."""

    def send(key: str | None = None, model: str = MODEL, **options: Any) -> tuple[openai.APIStatusError, int]:
        sent = 0

        def count(_: object) -> None:
            nonlocal sent
            sent += 1

        async def count_async(_: object) -> None:
            count(_)

        options = {"model": model, "messages": HELLO, "max_tokens": 2, **options}
        base = {"base_url": f"{stack.url}/v1", "api_key": key or stack.key, "max_retries": 1}

        async def call() -> Any:
            hooks: Any = {"request": [count_async]}
            async with openai.AsyncOpenAI(**base, http_client=httpx2.AsyncClient(event_hooks=hooks)) as client:  # type: ignore[arg-type]
                return await client.chat.completions.create(**options)

        with pytest.raises(openai.APIStatusError) as exc_info:
            if request.param == "async":
                asyncio.run(call())
            else:
                hooks: Any = {"request": [count]}
                with openai.OpenAI(**base, http_client=httpx2.Client(event_hooks=hooks)) as client:  # type: ignore[arg-type]
                    client.chat.completions.create(**options)
        assert set(exc_info.value.body) == {"message", "type", "param", "code"}  # type: ignore[arg-type]
        assert exc_info.value.request_id is not None
        return exc_info.value, sent

    return send


def fields(error: openai.APIStatusError) -> tuple[type, int, str | None, str | None]:
    return type(error), error.status_code, error.type, error.code


def test_invalid_input_is_not_retried(send: Send) -> None:
    invalid = "invalid_request_error"
    for options, code, param in (
        ({"max_tokens": 10**6}, "invalid_value", "max_tokens"),
        ({"extra_body": {"audio": {}}}, "unsupported_parameter", "audio"),
        ({"extra_body": {"temprature": 1}}, "unknown_parameter", "temprature"),
        ({"temperature": 3}, "invalid_value", "temperature"),
    ):
        error, sent = send(**options)
        assert fields(error) == (openai.BadRequestError, 400, invalid, code)
        assert (sent, error.param) == (1, param)
    error, sent = send(model="gpt-5")
    assert (fields(error), sent) == ((openai.NotFoundError, 404, invalid, "model_not_found"), 1)
    error, sent = send(messages=[{"role": "user", "content": "x" * (9 << 20)}])
    assert (fields(error), sent) == ((openai.APIStatusError, 413, invalid, "request_too_large"), 1)


@pytest.mark.parametrize("send", ["sync", "async"], indirect=True)
def test_authentication_and_permission_errors(stack: Stack, send: Send) -> None:
    error, sent = send("sk-mr-unknown")
    assert (fields(error), sent) == (
        (openai.AuthenticationError, 401, "invalid_request_error", "invalid_api_key"),
        1,
    )
    elsewhere = make_key(stack, "other models", allowed_models=["another"])
    error, sent = send(elsewhere)
    assert (fields(error), sent) == (
        (openai.PermissionDeniedError, 403, "permission_error", "model_not_allowed"),
        1,
    )
    scoped = make_key(stack, "models alone", scopes=["models"])
    error, sent = send(scoped)
    assert fields(error) == (openai.PermissionDeniedError, 403, "permission_error", "insufficient_scope")


@pytest.mark.parametrize("send", ["sync", "async"], indirect=True)
def test_a_large_body_with_an_invalid_key_receives_401(send: Send) -> None:
    error, sent = send("sk-mr-unknown", messages=[{"role": "user", "content": "x" * (7 << 20)}])
    assert (fields(error), sent) == (
        (openai.AuthenticationError, 401, "invalid_request_error", "invalid_api_key"),
        1,
    )


def test_a_client_with_expect_100_continue_is_rejected_before_sending_its_body(stack: Stack) -> None:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-mr-unknown\r\n"
        "content-length: 7000000\r\nexpect: 100-continue\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", stack.port), timeout=60) as connection:
        connection.sendall(head.encode())
        assert connection.recv(2**16).startswith(b"HTTP/1.1 401 ")


def test_a_large_prompt_is_completed(stack: Stack) -> None:
    """A prompt process reads it, with the same result as for a small prompt."""
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "temperature": 0}
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=stack.key) as client:
        answer = client.chat.completions.create(messages=[{"role": "user", "content": "Hello " * 1500}], **options)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens > 1500
        with pytest.raises(openai.BadRequestError) as exc_info:
            client.chat.completions.create(messages=[{"role": "user", "content": ""}] * 9000, **options)
    assert (exc_info.value.code, exc_info.value.param) == ("context_length_exceeded", "messages")


def test_rate_limit_errors_are_retried_only_if_the_wait_is_short(stack: Stack, send: Send) -> None:
    key = make_key(stack, "one a day", {"requests_per_day": 1})
    eventually(lambda: _served(stack, key))
    error, sent = send(key)
    assert fields(error) == (openai.RateLimitError, 429, "rate_limit_error", "rate_limit_exceeded")
    assert "requests" in error.message
    headers = error.response.headers
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("1", "0")
    assert int(headers["retry-after"]) > 60
    assert headers["x-should-retry"] == "false"
    assert sent == 1  # hours away, so the SDK does not retry
    soon = make_key(stack, "thirty a minute", {"requests_per_minute": 30})
    eventually(lambda: _served(stack, soon))
    with stack_client(stack, soon) as client:  # the SDK waits for the retry time, and then succeeds
        for _ in range(32):
            assert client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1).choices  # type: ignore[arg-type]


def stack_client(stack: Stack, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key=key, max_retries=3)


def _served(stack: Stack, key: str) -> bool:
    with stack_client(stack, key).with_options(max_retries=0) as client:
        return bool(client.models.list().data) and bool(
            client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=1).choices  # type: ignore[arg-type]
        )
