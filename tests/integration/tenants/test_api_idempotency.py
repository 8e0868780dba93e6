"""The management API's `Idempotency-Key`: repeated, concurrent and killed calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from rest_framework.test import APIClient

from tenants import actions
from tenants.models import ApiKey, IdempotentResponse, Project
from tests.support.rows import unscoped
from tests.support.tenants.management_api import by_key, furnished, only_default

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("all_models_served")]


@pytest.fixture
def client(furnished_acme) -> APIClient:
    return by_key(furnished_acme.tenant)


def again(client: APIClient, name: str = "once", url: str = "/api/keys", data: object = None):
    return client.post(url, data or {"name": "x"}, headers={"Idempotency-Key": name})


def test_a_repeated_post_runs_once(client, furnished_acme):
    before = unscoped(ApiKey).count()
    first, second = again(client), again(client)
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.content == second.content
    assert second.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert unscoped(ApiKey).count() == before + 1
    secret = first.json()["secret"].encode()
    assert all(secret not in bytes(row.body) for row in unscoped(IdempotentResponse).all())


def test_another_body_is_a_conflict(client):
    again(client)
    for response in (again(client, data={"name": "y"}), again(client, url="/api/projects", data={"slug": "a"})):
        assert (response.status_code, response.json()["code"]) == (409, "idempotency_conflict")


def test_idempotency_keys_belong_to_the_caller(client, furnished_acme):
    first = again(client).json()
    assert again(by_key(furnished_acme.tenant)).json()["id"] != first["id"]
    assert again(by_key(furnished("other").tenant)).status_code == 201


def test_a_rejection_is_not_stored(client, furnished_acme):
    refused = again(client, url="/api/projects", data={"slug": "spare", "name": "Spare"})
    assert refused.status_code == 409
    assert refused.json()["code"] == "conflict"
    actions.do_delete_project(unscoped(Project).get(pk=furnished_acme.ids["api-project"]))
    assert again(client, url="/api/projects", data={"slug": "spare", "name": "Spare"}).status_code == 201


@pytest.mark.parametrize("name", ["", "x" * 256])
def test_invalid_idempotency_keys_are_rejected(client, name):
    assert again(client, name=name).status_code == 400


@pytest.mark.django_db(transaction=True)
def test_concurrent_posts_run_once():
    tenant = actions.do_create_tenant("acme", "Acme")
    _, secret = actions.do_create_api_key(only_default(tenant), "manage", scopes=["manage"])
    start = threading.Barrier(4)

    def post(_: int):
        client = APIClient()
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
        start.wait()
        try:
            return again(client)
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(post, range(4)))
    assert {answer.status_code for answer in answers} <= {201, 409}
    assert len({answer.content for answer in answers if answer.status_code == 201}) == 1
    for answer in answers:
        if answer.status_code == 409:
            assert answer.headers["Retry-After"] == "1"
    assert unscoped(ApiKey).count() == 2


@pytest.mark.django_db(transaction=True)
def test_a_killed_call_can_be_repeated(monkeypatch):
    tenant = actions.do_create_tenant("acme", "Acme")
    client = by_key(tenant)
    client.raise_request_exception = False
    real: Callable[..., Any] = actions.do_create_api_key

    def dies(*args: Any, **fields: Any) -> Any:
        real(*args, **fields)
        raise KeyboardInterrupt  # simulates a kill after the work and before the commit

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(actions, "do_create_api_key", dies)
        patch.setattr("tenants.api.idempotency._IdempotentRequest.forget", lambda self: None)
        again(client)
    assert unscoped(ApiKey).count() == 1
    assert again(client).status_code == 409
    monkeypatch.setattr("tenants.api.idempotency.STALE", timedelta(0))
    assert again(client).status_code == 201
    assert unscoped(ApiKey).count() == 2
