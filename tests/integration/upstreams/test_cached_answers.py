"""Cached answers of upstreams, through a gateway and a worker: which are kept, and which requests share them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import httpx2
import pytest
import redis

from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from tenants import actions
from tenants.actions.credentials import (
    do_create_credential,
    do_remove_credential,
    do_rotate_credential,
    do_update_credential,
)
from tenants.models import Tenant
from tenants.tasks import deliver_credentials
from tests.support.billing.books import LIST_A, rate_card
from tests.support.upstreams.platform import UpstreamPlatform, eventually, upstream_platform
from tests.support.upstreams.protocol_server import Answer, ProtocolServer

pytestmark = pytest.mark.timeout(300)
PLATFORMS = "sk-of-the-platform-01234"
HITS = {"answer_hit_input": "0.1", "answer_hit_output": "0.1"}
MESSAGES = [{"role": "user", "content": "Hi"}]
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/responses": {"input": "Hi", "store": False},
}
UNKEPT = {
    "filtered": Answer("No.", finish="content_filter"),
    "empty": Answer(""),
    "white space": Answer(" "),
    "reasoning": Answer("", reasoning="I think about it"),
}


@pytest.fixture
def server() -> Iterator[ProtocolServer]:
    server = ProtocolServer()
    yield server
    server.close()


@pytest.fixture
def platform(
    broker: redis.Redis, database: str, secret: str, server: ProtocolServer, tenant: Tenant
) -> Iterator[UpstreamPlatform]:
    rate_card("gpt", **{**LIST_A, **HITS})
    actions.do_update_settings(tenant, answer_cache_seconds=600)
    ours = do_create_credential(None, "openai", PLATFORMS)
    with upstream_platform(broker, database, secret) as platform:
        spec = UpstreamSpec(UpstreamEngine.OPENAI, server.url, "gpt-x", "openai", ours.pk, allow_internal=True)
        platform.deploy({"gpt": spec})
        deliver_credentials()
        eventually(lambda: ask(platform, "Is it served?").status_code == 200)
        yield platform


def ask(platform: UpstreamPlatform, text: str, key: str = "", **headers: str) -> httpx2.Response:
    body = {"model": "gpt", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    if key:
        headers["authorization"] = f"Bearer {key}"
    return platform.client.post("/v1/chat/completions", json=body, headers=headers)


def check_filtered_and_empty_answers(platform: UpstreamPlatform, server: ProtocolServer) -> None:
    """Check that they are not kept, in any dialect."""
    served = []
    for number, (path, stream, name) in enumerate(product(PATHS, (False, True), UNKEPT)):
        body = PATHS[path] | {"model": "gpt", "temperature": 0, "stream": stream, "top_p": 1 - number / 100}
        layers = []
        for answer in (UNKEPT[name], Answer("Hello"), Answer("Another")):
            server.answers.append(answer)
            response = platform.client.post(path, json=body)
            assert response.status_code == 200, response.text
            layers.append(response.headers["x-millrace-cache"])
        server.answers.clear()
        served.append((path, stream, name, layers))
    # The first answer is not kept, the second one is.
    assert [case for case in served if case[-1][1:] != ["miss", "exact"] or case[-1][0] == "exact"] == []
    assert len(served) == 24


def check_credentials(platform: UpstreamPlatform, server: ProtocolServer, tenant: Tenant) -> None:
    """Check that an answer is served only with the credential that paid for it."""
    number = 0

    def computed_with(secret: str) -> bool:
        """Return whether the worker has the secret. A new question is never a hit."""
        nonlocal number
        deliver_credentials()  # as the web jobs do every two seconds
        number += 1
        return ask(platform, f"Question {number}").status_code == 200 and last(server) == secret

    def answer(secret: str) -> str:
        """Ask the same question twice, computed with this secret. Return the layer of the first answer."""
        eventually(lambda: computed_with(secret))
        sent = len(server.received)
        first, second = [ask(platform, "The same question").headers["x-millrace-cache"] for _ in range(2)]
        assert second == "exact"
        assert [each.headers["authorization"] for each in server.received[sent:]] == (
            [] if first == "exact" else [f"Bearer {secret}"]
        )
        return first

    assert answer(PLATFORMS) == "miss"
    own = do_create_credential(tenant, "own", "sk-of-the-tenant-0123456", model_names=["gpt"])
    assert answer("sk-of-the-tenant-0123456") == "miss"
    do_update_credential(own, daily_spend_limit_nano=10**12)
    assert answer("sk-of-the-tenant-0123456") == "exact"
    do_rotate_credential(own, "sk-rotated-0123456789")
    assert answer("sk-rotated-0123456789") == "miss"
    do_update_credential(own, model_names=["another"])
    assert answer(PLATFORMS) == "exact"
    do_remove_credential(own)
    assert answer(PLATFORMS) == "exact"
    do_create_credential(tenant, "own", "sk-rotated-0123456789", model_names=["gpt"])
    assert answer("sk-rotated-0123456789") == "miss"


def last(server: ProtocolServer) -> str:
    return server.received[-1].headers["authorization"].removeprefix("Bearer ")


def check_projects(platform: UpstreamPlatform, tenant: Tenant) -> None:
    """Check that projects share answers only if the tenant chose so."""
    project = actions.do_create_project(tenant, "other", "Other")
    _, other = actions.do_create_api_key(project, "other")
    assert ask(platform, "One").headers["x-millrace-cache"] == "miss"
    assert ask(platform, "One", other).headers["x-millrace-cache"] == "exact"
    actions.do_update_settings(tenant, answer_cache_scope="project")
    for name in ("", other):  # both gateways' copies of the keys are new when the answer is computed
        eventually(lambda name=name: ask(platform, "One", name).headers["x-millrace-cache"] == "miss")  # type: ignore[misc]
        assert ask(platform, "One", name).headers["x-millrace-cache"] == "exact"
    assert ask(platform, "Two", other).headers["x-millrace-cache"] == "miss"
    assert ask(platform, "Two").headers["x-millrace-cache"] == "miss"
    _, second = actions.do_create_api_key(project, "second")
    assert ask(platform, "Two", second).headers["x-millrace-cache"] == "exact"


def test_cached_answers(platform: UpstreamPlatform, server: ProtocolServer, tenant: Tenant) -> None:
    """Run all parts with the same processes, whose start takes longer than the requests."""
    check_filtered_and_empty_answers(platform, server)
    check_credentials(platform, server, tenant)
    check_projects(platform, tenant)
