"""A short request that tests a deployment: its response, latency, usage and cost."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Any

import httpx2

PROMPT = "Say hello."
MAX_TOKENS = 32
TIMEOUT_SECONDS = 120.0
MAX_ERROR_LENGTH = 500


class TestCallFailed(Exception):
    """An error of a test call, with the response of the platform."""

    __test__ = False  # for pytest


@dataclass(frozen=True)
class TestCallResult:
    """The response to a test call, and its measurements."""

    __test__ = False  # for pytest
    model: str
    text: str
    prompt_tokens: int
    cached_tokens: int
    tokens: int  # completion tokens
    ttft_ms: int | None  # None: not a stream
    total_ms: int
    cost_usd: str | None  # exact; None: a stream
    request_id: str = ""  # empty: unknown

    @property
    def tokens_per_second(self) -> float | None:
        """Return the speed after the first token; None without a stream, or with one token."""
        if self.ttft_ms is None or self.tokens < 2 or self.total_ms <= self.ttft_ms:
            return None
        return (self.tokens - 1) * 1000 / (self.total_ms - self.ttft_ms)

    @property
    def summary(self) -> str:
        """Return the measurements in a sentence."""
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        first = "" if self.ttft_ms is None else f", the first token after {self.ttft_ms} ms"
        cost = "" if self.cost_usd is None else f" for {self.cost_usd} USD"
        tokens = f"{self.prompt_tokens} prompt{cached} and {self.tokens} completion tokens"
        return f"{tokens} in {self.total_ms} ms{first}{cost}."


def send_test_call(
    url: str, api_key: str, model: str, prompt: str, *, stream: bool = False, timeout: float = TIMEOUT_SECONDS
) -> TestCallResult:
    """Send a chat completion to the gateway.

    Raises:
        TestCallFailed: the platform cannot be reached, or responds with an error.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": MAX_TOKENS,
    }
    headers = {"authorization": f"Bearer {api_key}"}
    started = time.monotonic()
    try:
        if stream:
            return _read_stream(url, headers, body, started, timeout)
        response = httpx2.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=timeout)
        total_ms = _ms_since(started)
        if response.status_code != 200:
            raise TestCallFailed(_error_text(model, response))
        answer = response.json()
        text = str(answer["choices"][0]["message"].get("content") or "")
        return _result(model, text, answer.get("usage"), None, total_ms, response.headers)
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeEncodeError) as exc:
        raise TestCallFailed(f"{model}: {exc}. Check the URL and the key, and that the platform runs.") from exc


def _read_stream(
    url: str, headers: dict[str, str], body: dict[str, Any], started: float, timeout: float
) -> TestCallResult:
    model, text, usage, ttft_ms = body["model"], "", None, None
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    with httpx2.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=timeout) as response:
        received = response.headers
        if response.status_code != 200:
            response.read()
            raise TestCallFailed(_error_text(model, response))
        for line in response.iter_lines():
            if time.monotonic() - started > timeout:  # pings keep the timeout of each read from ending the call
                raise TestCallFailed(f"{model}: the response was not complete after {timeout:.0f} seconds.")
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise TestCallFailed(f"{model}: {event['error'].get('message', '')[:MAX_ERROR_LENGTH]}")
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                part = choice["delta"].get("content") or ""
                if part and ttft_ms is None:
                    ttft_ms = _ms_since(started)
                text += part
    total_ms = _ms_since(started)
    return _result(model, text, usage, total_ms if ttft_ms is None else ttft_ms, total_ms, received)


def _result(
    model: str,
    text: str,
    usage: dict[str, Any] | None,
    ttft_ms: int | None,
    total_ms: int,
    received: httpx2.Headers,
) -> TestCallResult:
    usage = usage or {}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    prompt_tokens, tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    return TestCallResult(
        model,
        text,
        prompt_tokens,
        cached,
        tokens,
        ttft_ms,
        total_ms,
        received.get("x-millrace-cost-usd"),
        received.get("x-request-id", ""),
    )


def _error_text(model: str, response: httpx2.Response) -> str:
    try:
        reason = str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        reason = response.text
    return f"{model}: status {response.status_code}: {reason[:MAX_ERROR_LENGTH]}"


def _ms_since(started: float) -> int:
    return round((time.monotonic() - started) * 1000)
