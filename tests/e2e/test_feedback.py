"""Feedback on requests of the running platform."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tests.support.stack import MODEL, Stack


@pytest.fixture(scope="module")
def request_id(stack: Stack) -> str:
    asked = {"model": MODEL, "prompt": "Hello", "max_tokens": 1}
    response = httpx2.post(f"{stack.url}/v1/completions", json=asked, headers=stack.headers, timeout=60)
    return str(response.headers["x-request-id"])


def report(stack: Stack, request_id: str, **submitted: Any) -> httpx2.Response:
    return httpx2.post(
        f"{stack.url}/v1/requests/{request_id}/feedback", json=submitted, headers=stack.headers, timeout=60
    )


def test_feedback_is_stored_once(stack: Stack, request_id: str) -> None:
    submitted = {"success": True, "score": 0.75, "label": "accepted", "metadata": {"by": "a person"}}
    first, again = report(stack, request_id, **submitted), report(stack, request_id, **submitted)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json() == {**first.json(), "id": request_id, "object": "request.feedback", **submitted}
    other = report(stack, request_id, **submitted | {"success": False})
    assert (other.status_code, other.json()["error"]["code"]) == (409, "feedback_conflict")
    assert other.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("submitted", "param"),
    [
        ({}, "success"),
        ({"success": "yes"}, "success"),
        ({"score": 1.5}, "score"),
        ({"score": "1"}, "score"),
        ({"label": ""}, "label"),
        ({"label": "x" * 65}, "label"),
        ({"success": True, "metadata": {"a": 1}}, "metadata"),
        ({"success": True, "metadata": {"a": "x" * 513}}, "metadata"),
        ({"verdict": "good"}, "verdict"),
        ({"label": "a\0b"}, None),
    ],
)
def test_invalid_feedback_is_rejected(
    stack: Stack, request_id: str, submitted: dict[str, Any], param: str | None
) -> None:
    answer = report(stack, request_id, **submitted)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert (error["param"] or "").startswith(param or "")


def test_feedback_on_an_unknown_request_is_rejected(stack: Stack, request_id: str) -> None:
    for name in ("req_unknown", "x" * 300, "%00", request_id + "%00"):
        answer = report(stack, name, success=True)
        assert (answer.status_code, answer.json()["error"]["code"]) in [(404, "not_found"), (400, "invalid_value")], (
            name
        )
    get = httpx2.get(f"{stack.url}/v1/requests/{request_id}/feedback", headers=stack.headers)
    assert get.status_code == 405
