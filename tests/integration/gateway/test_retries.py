"""Behavior of both SDKs on API errors: the exception, and the number of requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import anthropic
import openai
import pytest

from millrace.gateway.core.errors import ApiError
from millrace.gateway.protocols.dialects import ANTHROPIC, OPENAI, Dialect

HELLO: Any = [{"role": "user", "content": "Hello"}]
RETRIES = 1

# code, retry time, the exception of each SDK, whether the SDKs may retry
ERRORS = [
    ("invalid_value", None, openai.BadRequestError, anthropic.BadRequestError, False),
    ("invalid_api_key", None, openai.AuthenticationError, anthropic.AuthenticationError, False),
    ("tenant_suspended", None, openai.PermissionDeniedError, anthropic.PermissionDeniedError, False),
    ("model_not_allowed", None, openai.PermissionDeniedError, anthropic.PermissionDeniedError, False),
    ("model_not_found", None, openai.NotFoundError, anthropic.NotFoundError, False),
    ("idempotency_conflict", None, openai.ConflictError, anthropic.ConflictError, False),
    ("request_too_large", None, openai.APIStatusError, anthropic.RequestTooLargeError, False),
    ("rate_limit_exceeded", 0.5, openai.RateLimitError, anthropic.RateLimitError, True),
    ("rate_limit_exceeded", 61, openai.RateLimitError, anthropic.RateLimitError, False),
    ("rate_limit_exceeded", None, openai.RateLimitError, anthropic.RateLimitError, False),
    ("budget_exceeded", 5, openai.RateLimitError, anthropic.PaymentRequiredError, False),
    ("quota_exceeded", None, openai.RateLimitError, anthropic.PaymentRequiredError, False),
    ("credit_balance_exhausted", None, openai.RateLimitError, anthropic.PaymentRequiredError, False),
    ("server_is_overloaded", 0.5, openai.InternalServerError, anthropic.OverloadedError, True),
    ("model_loading", 0.5, openai.InternalServerError, anthropic.OverloadedError, True),
    ("not_served", None, openai.InternalServerError, anthropic.InternalServerError, False),
    ("timeout", None, openai.InternalServerError, anthropic.DeadlineExceededError, True),
]


@contextmanager
def error_server(api_error: ApiError, words: Dialect) -> Iterator[tuple[str, list[str]]]:
    """Run a server that responds to every request with the error; yield its URL and the list of requested paths."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps(words.body(api_error, "req_1")).encode()
            self.send_response(words.status(api_error))
            for name, value in [*api_error.headers(), (b"content-length", str(len(body)).encode())]:
                self.send_header(name.decode(), value.decode())
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # the interval of its check for shutdown
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def call_openai(url: str, kind: str) -> None:
    options: Any = {"base_url": f"{url}/v1", "api_key": "sk-x", "max_retries": RETRIES}
    body: Any = {"model": "m", "messages": HELLO}
    if kind == "sync":
        with openai.OpenAI(**options) as client:
            client.chat.completions.create(**body)
        return

    async def call() -> None:
        async with openai.AsyncOpenAI(**options) as client:
            await client.chat.completions.create(**body)

    asyncio.run(call())


def call_anthropic(url: str, kind: str) -> None:
    options: Any = {"base_url": url, "api_key": "sk-x", "max_retries": RETRIES}
    body: Any = {"model": "m", "messages": HELLO, "max_tokens": 1}
    if kind == "sync":
        with anthropic.Anthropic(**options) as client:
            client.messages.create(**body)
        return

    async def call() -> None:
        async with anthropic.AsyncAnthropic(**options) as client:
            await client.messages.create(**body)

    asyncio.run(call())


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize(("code", "after", "of_openai", "of_anthropic", "again"), ERRORS)
def test_errors_and_retries(
    code: str, after: float | None, of_openai: type[Exception], of_anthropic: type[Exception], again: bool, kind: str
) -> None:
    api_error = ApiError(code, "Because.", retry_after=after)
    for words, call, class_ in (
        (OPENAI, call_openai, of_openai),
        (ANTHROPIC, call_anthropic, of_anthropic),
    ):
        with error_server(api_error, words) as (url, asked):
            with pytest.raises(class_) as exc_info:
                call(url, kind)
            assert type(exc_info.value) is class_
            assert len(asked) == (1 + RETRIES if again else 1)
