"""Requests with an idempotency key."""

from __future__ import annotations

from typing import Any

import httpx2

from tests.support.stack import MODEL, Stack

PATH = "/v1/chat/completions"


def body(max_tokens: int = 5, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "ignore_eos": True, **more}


def named(stack: Stack, name: str) -> dict[str, str]:
    return {**stack.headers, "idempotency-key": name}


def post(stack: Stack, name: str, asked: dict[str, Any], path: str = PATH) -> httpx2.Response:
    return httpx2.post(stack.url + path, json=asked, headers=named(stack, name), timeout=60)
