"""Fuzzing of the running platform: every request gets a response, never an internal error."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.support.gateway.requests import ANY_JSON, HELLO, LIKELY, NAMES
from tests.support.stack import MODEL, Stack
from tools.openapi.formatting import read_yaml

# Bounded, so that valid requests end soon.
SHORT = {"max_tokens": st.integers(-1, 4), "n": st.integers(-1, 3), "stream": st.booleans()}
SECONDS = 30
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "50"))
IGNORED = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]

DOCUMENT = read_yaml((Path(__file__).parents[2] / "docs" / "openapi.yaml").read_text(encoding="utf-8"))
OPERATIONS = [
    (method.upper(), path, operation, [*item.get("parameters", []), *operation.get("parameters", [])])
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
    if method in ("get", "post", "delete")
]
LONG = "x" * 60_000
# In URLs: NUL, half of a surrogate pair, a byte that is not UTF-8, long texts.
IN_URLS = ("a%00b", "a%ED%A0%80b", "a%FFb", LONG, "9" * 60_000, "%C2%B2")
IN_HEADERS = (b"\xff", b"\xed\xa0\x80", LONG.encode(), b"9" * 5000)
IN_JSON = ("a\0b", "\ud800", "x" * 65_536, "9" * 65_536)


def resolved(part: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the document that a reference names."""
    found: Any = DOCUMENT
    for name in part.get("$ref", "").removeprefix("#/").split("/") if "$ref" in part else ():
        found = found[name]
    return found if "$ref" in part else part


def hostile_requests(method: str, path: str, operation: Any, parameters: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield requests in which one parameter, header or field of the operation has a text that no client sends."""
    plain = re.sub("{.*?}", "x", path)
    yield {"url": plain}
    for value in IN_URLS if "{" in path else ():
        yield {"url": re.sub("{.*?}", value, path)}
    for parameter in map(resolved, parameters):
        if parameter["in"] == "query":
            yield from ({"url": f"{plain}?{parameter['name']}={value}"} for value in IN_URLS)
        elif parameter["in"] == "header":
            yield from ({"url": plain, "headers": {parameter["name"]: value}} for value in IN_HEADERS)
    for content in resolved(operation.get("requestBody", {})).get("content", {}).values():
        for name in resolved(content.get("schema", {})).get("properties", {}):
            yield from ({"url": plain, "content": json.dumps({name: value})} for value in IN_JSON)


@pytest.mark.parametrize("with_key", [True, False], ids=["key", "visitor"])
@pytest.mark.parametrize(
    ("method", "path", "operation", "parameters"), OPERATIONS, ids=lambda each: each if isinstance(each, str) else ""
)
def test_no_text_is_an_internal_error(
    stack: Stack, method: str, path: str, operation: Any, parameters: list[Any], with_key: bool
) -> None:
    with httpx2.Client(base_url=stack.url, headers=stack.headers if with_key else {}, timeout=SECONDS) as client:
        for request in hostile_requests(method, path, operation, parameters):
            url = httpx2.URL(stack.url).copy_with(raw_path=request.pop("url").encode())
            response = client.request(method, url, **request)
            assert response.status_code < 500, (str(url)[:100], str(request)[:100], response.text[:300])


def check_response(stack: Stack, path: str, body: bytes) -> None:
    response = httpx2.post(f"{stack.url}/v1/{path}", content=body, headers=stack.headers, timeout=SECONDS)
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
