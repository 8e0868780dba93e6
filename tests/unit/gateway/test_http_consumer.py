"""Headers of responses: CORS, Allow, compression, and the dialect of errors."""

from __future__ import annotations

import asyncio
import gzip
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
from tenants.keys.snapshot import ApiKeySnapshot
from tests.support.gateway.keys import KEY, MODEL

PLATFORM, TENANT, OTHER = "https://console.example", "https://app.example", "https://other.example"


class Keys:
    async def authenticate(self, headers: dict[bytes, bytes], scope: str, address: str) -> ApiKeySnapshot:
        if b"authorization" not in headers:
            raise ApiError("invalid_api_key", "No API key provided.")
        return msgspec.structs.replace(KEY, allowed_origins=(TENANT,))


class Response:
    def __init__(self) -> None:
        self.status, self.body = 0, b""
        self.headers: dict[str, str] = {}

    def json(self) -> Any:
        return msgspec.json.decode(self.body)


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
        settings=SimpleNamespace(models=()),
    )
    monkeypatch.setattr("millrace.gateway.http.consumer.running_gateway", lambda: found)
    return found


async def call(consumer: type[HttpConsumer], method: str, path: str = "/v1/models", **headers: str) -> Response:
    response, over = Response(), asyncio.Event()
    is_sent = False

    async def receive() -> dict[str, Any]:
        nonlocal is_sent
        if not is_sent and method == "POST":
            is_sent = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            response.status = message["status"]
            response.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            response.body += message["body"]
            if not message["more_body"]:
                over.set()

    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "client": ("127.0.0.1", 1), "headers": named}
    scope["url_route"] = {"kwargs": {}}
    await asyncio.wait_for(consumer.as_asgi()(scope, receive, send), 60)
    return response


pytestmark = pytest.mark.usefixtures("gateway")


async def test_a_response_is_readable_for_the_origins_of_the_platform_and_of_the_keys_tenant() -> None:
    for origin, key, allowed in (
        (PLATFORM, "Bearer x", True),
        (TENANT, "Bearer x", True),
        (OTHER, "Bearer x", False),
        (PLATFORM, None, True),
        (TENANT, None, False),
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


async def test_the_dialect_of_models_and_of_unknown_paths() -> None:
    listed = (await call(ModelsEndpoint, "GET", authorization="x", anthropic_version="2023-06-01")).json()
    assert (listed["data"][0]["type"], listed["first_id"], listed["has_more"]) == ("model", "model-0", False)
    assert (await call(ModelsEndpoint, "GET", authorization="x")).json()["object"] == "list"
    assert (await call(ModelsEndpoint, "GET", anthropic_version="x")).json()["error"]["type"] == "authentication_error"
    assert (await call(Unknown, "GET", "/v1/messages/x")).json()["error"]["type"] == "not_found_error"
    assert (await call(Unknown, "GET", "/v1/x")).json()["error"]["code"] == "not_found"
