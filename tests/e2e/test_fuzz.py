"""Fuzzing of the running platform: every request gets a response, never an internal error."""

from __future__ import annotations

import os
from typing import Any

import httpx
import msgspec
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.support.gateway.requests import ANY_JSON, HELLO, LIKELY, NAMES
from tests.support.stack import MODEL, Stack

# Bounded, so that valid requests end soon.
SHORT = {"max_tokens": st.integers(-1, 4), "n": st.integers(-1, 3), "stream": st.booleans()}
SECONDS = 30
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "50"))
IGNORED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def check_response(stack: Stack, path: str, body: bytes) -> None:
    response = httpx.post(f"{stack.url}/v1/{path}", content=body, headers=stack.headers, timeout=SECONDS)
    event(str(response.status_code))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n"), response.text
    else:
        assert response.json()["choices"]


def some(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw at most three of the fields. With more, hardly any body would be valid."""
    names = st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=3)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))


@given(
    path=st.sampled_from(["chat/completions", "completions"]),
    nonsense=st.just({}) | st.dictionaries(NAMES, ANY_JSON, max_size=1),
    likely=some({**LIKELY, **SHORT}),
)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=IGNORED)
def test_any_fields_get_a_response(stack: Stack, path: str, nonsense: dict[str, Any], likely: dict[str, Any]) -> None:
    prompt = {"messages": HELLO} if path == "chat/completions" else {"prompt": "Hello"}
    body = {"model": MODEL, "max_tokens": 2, **prompt, **nonsense, **likely}
    check_response(stack, path, msgspec.json.encode({**body, "max_completion_tokens": None}))


@given(st.binary(max_size=60) | st.text().map(lambda text: f'{{"model": {text}'.encode(errors="replace")))
@settings(max_examples=EXAMPLES // 2, deadline=None, suppress_health_check=IGNORED)
def test_any_text_gets_a_response(stack: Stack, body: bytes) -> None:
    check_response(stack, "chat/completions", body)
