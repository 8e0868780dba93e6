"""Requests as real clients send them: their headers, URLs, encodings and fields, through a whole platform."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.support.stack import MODEL, Stack, eventually

HELLO = [{"role": "user", "content": "Hello"}]


def post(stack: Stack, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 2, **fields}
    return httpx.post(f"{stack.url}{path}", json=body, headers=stack.headers, timeout=60)


def set_mode(stack: Stack, mode: str) -> None:
    body = {"unknown_parameters": mode}
    response = httpx.patch(f"{stack.url}/api/tenant", json=body, headers=stack.headers, timeout=60)
    assert response.status_code == 200, response.text
    assert response.json()["unknown_parameters"] == mode


def test_ignored_fields_are_named_in_the_header_and_the_record(stack: Stack) -> None:
    named = "store, messages[].mood, flavor"
    response = post(stack, messages=[{**HELLO[0], "mood": "good"}], flavor=1, store=True)
    assert response.status_code == 200
    assert set(response.headers["x-millrace-ignored"].split(", ")) == set(named.split(", "))
    assert "x-millrace-ignored" not in post(stack).headers
    long = post(stack, messages=[{**HELLO[0], "mood": "good " * 2000}])  # read by a prompt process
    assert long.headers["x-millrace-ignored"] == "messages[].mood"
    url = f"{stack.url}/api/requests/{response.headers['x-request-id']}"
    eventually(lambda: httpx.get(url, headers=stack.headers, timeout=60).json()["record"])
    record = httpx.get(url, headers=stack.headers, timeout=60).json()["record"]
    assert set(record["ignored"]) == set(named.split(", "))


def test_a_tenant_can_reject_unknown_fields(stack: Stack) -> None:
    set_mode(stack, "reject")
    try:
        eventually(lambda: post(stack, flavor=1).status_code == 400)
        error = post(stack, flavor=1, padding="x" * 5000).json()["error"]  # read by a prompt process
        assert (error["code"], error["param"]) == ("unknown_parameter", "flavor")
        assert post(stack, store=True).status_code == 200
    finally:
        set_mode(stack, "default")
    eventually(lambda: post(stack, flavor=1).status_code == 200)


def test_a_typo_is_refused(stack: Stack) -> None:
    with pytest.raises(openai.BadRequestError) as exc_info:
        stack.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], extra_body={"max_completion_token": 5}
        )
    assert exc_info.value.param == "max_completion_token"
