"""Headers of responses: CORS, Allow, compression, and the dialect of errors."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.core.cors import CrossOrigin
from millrace.gateway.core.errors import ApiError
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.endpoints.inference import ChatCompletions, Unknown
from millrace.gateway.http.endpoints.models import ModelsEndpoint
from millrace.gateway.routes import documented_consumers
from tenants.keys.snapshot import ApiKeySnapshot
from tests.support.gateway.http_calls import call
from tests.support.gateway.keys import KEY, MODEL
from tools.openapi.operations import OPERATIONS

PLATFORM, TENANT, OTHER = "https://console.example", "https://app.example", "https://other.example"


class Keys:
    async def authenticate(self, headers: dict[bytes, bytes], scope: str, address: str) -> ApiKeySnapshot:
        if b"authorization" not in headers:
            raise ApiError("invalid_api_key", "No API key provided.")
        return msgspec.structs.replace(KEY, allowed_origins=(TENANT,))


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A gateway with only the parts that these endpoints use."""

    async def current_limit_statuses(key: ApiKeySnapshot) -> list[Any]:
        return []

    origins = CrossOrigin([PLATFORM], None)  # type: ignore[arg-type]  # no database
    origins._tenants, origins._read_at = frozenset({TENANT}), float("inf")
    found = SimpleNamespace(
        keys=Keys(),
        cross_origin=origins,
        active_requests=ActiveRequests(),
        metrics=SimpleNamespace(requests=SimpleNamespace(labels=lambda *_: SimpleNamespace(inc=lambda: None))),
        admission=SimpleNamespace(current_limit_statuses=current_limit_statuses),
        router=SimpleNamespace(visible=lambda key: {f"model-{number}": MODEL for number in range(50)}),
        settings=SimpleNamespace(models=(), base_url="https://llm.example"),
    )
    monkeypatch.setattr("millrace.gateway.http.consumer.running_gateway", lambda: found)
    return found


pytestmark = pytest.mark.usefixtures("gateway")


async def test_a_response_is_readable_for_the_origins_of_the_platform_and_of_the_keys_tenant() -> None:
    for origin, key, allowed in (
        (PLATFORM, "Bearer x", True),
        (TENANT, "Bearer x", True),
        (OTHER, "Bearer x", False),
        (PLATFORM, None, True),
        (TENANT, None, True),  # an error: the page can tell its user that the key is missing
        (OTHER, None, False),
    ):
        headers = {"origin": origin} | ({} if key is None else {"authorization": key})
        response = await call(ModelsEndpoint, "GET", **headers)
        assert response.status == (200 if key else 401)
        assert response.headers.get("access-control-allow-origin") == (origin if allowed else None)
        assert "origin" in response.headers["vary"]
        assert "access-control-allow-credentials" not in response.headers
    assert "vary" not in (await call(ModelsEndpoint, "GET")).headers


async def test_a_preflight_allows_the_origins_of_all_tenants() -> None:
    asked = {"access_control_request_method": "POST", "access_control_request_headers": "authorization, x-a"}
    for origin, allowed in ((PLATFORM, True), (TENANT, True), (OTHER, False)):
        response = await call(ChatCompletions, "OPTIONS", "/v1/chat/completions", origin=origin, **asked)
        assert (response.status, response.body) == (204, b"")
        assert response.headers.get("access-control-allow-origin") == (origin if allowed else None)
        assert response.headers.get("access-control-allow-headers") == ("authorization, x-a" if allowed else None)
    injected = await call(
        ChatCompletions,
        "OPTIONS",
        origin=TENANT,
        access_control_request_method="POST",
        access_control_request_headers="a;b",
    )
    assert "access-control-allow-headers" not in injected.headers


async def test_head_and_allow() -> None:
    assert (await call(ModelsEndpoint, "HEAD", authorization="x")).status == 200
    for consumer, method, allowed in ((ModelsEndpoint, "POST", "GET, HEAD"), (ChatCompletions, "GET", "POST")):
        response = await call(consumer, method, authorization="x")
        assert (response.status, response.headers["allow"]) == (405, allowed)
    assert (await call(ModelsEndpoint, "OPTIONS")).status == 405  # no preflight


async def test_a_large_response_is_compressed_if_the_client_accepts_it() -> None:
    plain = await call(ModelsEndpoint, "GET", authorization="x")
    packed = await call(ModelsEndpoint, "GET", authorization="x", accept_encoding="gzip")
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) == len(packed.body) < len(plain.body)
    assert gzip.decompress(packed.body) == plain.body
    small = await call(ModelsEndpoint, "GET", accept_encoding="gzip")
    assert "content-encoding" not in small.headers


GETS = sorted(
    {consumer for _, consumer in documented_consumers() if consumer.method == "GET"}, key=lambda each: each.__name__
)


@pytest.mark.parametrize("consumer", GETS)
async def test_a_query_parameter_has_an_effect_or_is_refused(consumer: type[HttpConsumer]) -> None:
    assert {each["name"] for each in OPERATIONS[consumer].parameters if each["in"] == "query"} == set(
        consumer.query_names
    )
    for query in ("color=red", *(f"{name}=1&{name}=1" for name in consumer.query_names)):
        response = await call(consumer, "GET", query=query, authorization="x")
        assert response.status == 400
        assert query.partition("=")[0] in response.json()["error"]["message"]
    assert (await call(consumer, "GET", query="color=red")).status == 401


@pytest.mark.parametrize(
    ("query", "names", "has_more"),
    [
        ("", range(50), False),
        ("beta=true", range(50), False),
        ("limit=1", [0], True),
        ("limit=50", range(50), False),
        ("limit=1000", range(50), False),
        ("limit=2&after_id=model-9", [10, 11], True),
        ("limit=2&after=model-9", [10, 11], True),
        ("after_id=model-47", [48, 49], False),
        ("after_id=model-49", [], False),
        ("limit=2&before_id=model-9", [7, 8], True),
        ("before_id=model-2", [0, 1], False),
    ],
)
async def test_pages_of_models(query: str, names: Sequence[int], has_more: bool) -> None:
    for headers in ({}, {"anthropic_version": "2023-06-01"}):
        listed = (await call(ModelsEndpoint, "GET", query=query, authorization="x", **headers)).json()
        assert [model["id"] for model in listed["data"]] == [f"model-{number}" for number in names]
        assert listed.get("has_more", False) is has_more
        if headers:
            ends = (f"model-{names[0]}", f"model-{names[-1]}") if names else (None, None)
            assert (listed["first_id"], listed["last_id"]) == ends


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "limit=x", "after_id=x", "before_id=x", "after=x", "after_id=model-1&before_id=model-2"],
)
async def test_an_invalid_page_of_models_is_refused(query: str) -> None:
    assert (await call(ModelsEndpoint, "GET", query=query, authorization="x")).status == 400


async def test_the_dialect_of_models_and_of_unknown_paths() -> None:
    listed = (await call(ModelsEndpoint, "GET", authorization="x", anthropic_version="2023-06-01")).json()
    assert (listed["data"][0]["type"], listed["first_id"], listed["has_more"]) == ("model", "model-0", False)
    assert (await call(ModelsEndpoint, "GET", authorization="x")).json()["object"] == "list"
    assert (await call(ModelsEndpoint, "GET", anthropic_version="x")).json()["error"]["type"] == "authentication_error"
    assert (await call(Unknown, "GET", "/v1/messages/x")).json()["error"]["type"] == "not_found_error"
    error = (await call(Unknown, "GET", "/v1/x")).json()["error"]
    assert error["code"] == "not_found"
    assert "https://llm.example/v1" in error["message"]
