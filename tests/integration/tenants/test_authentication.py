"""Authentication of the management API: keys in both headers, and error responses."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from rest_framework.test import APIClient

from tenants import actions
from tenants.isolation.scopes import tenant_scope
from tenants.models import ApiKey, Tenant, User
from tests.support.rows import only_project

pytestmark = pytest.mark.django_db
URL = "/api/usage"


def key_of(tenant: Tenant, *scopes: str) -> tuple[ApiKey, str]:
    return actions.do_create_api_key(only_project(tenant), "k", scopes=scopes or ("manage",))


def get(client: APIClient, **headers: str):
    return client.get(URL, headers=headers)


@pytest.mark.parametrize("form", ["Bearer {}", "bearer  {}", None])
def test_a_valid_key_is_accepted(client, acme, form):
    _, secret = key_of(acme)
    headers = {"Authorization": form.format(secret)} if form else {"x-api-key": secret}
    response = get(client, **headers)
    assert response.status_code == 200, response.content
    assert response.json()["tenant"] == "acme"


def test_another_tenant_is_rejected(client, acme):
    actions.do_create_tenant("other", "Other")
    _, secret = key_of(acme)
    response = client.get(f"{URL}?tenant=other", headers={"x-api-key": secret})
    assert response.status_code == 404
    assert response.json()["code"] == "not_found"


def test_a_member_sees_only_their_tenants(client, acme):
    actions.do_create_tenant("other", "Other")
    user = User.objects.create_user("dev@example.com")
    actions.do_add_member(acme, user, "developer")
    client.force_login(user)
    assert client.get(URL).json()["tenant"] == "acme"
    assert client.get(f"{URL}?tenant=other").status_code == 404
    assert client.get(f"{URL}?tenant=other").content == client.get(f"{URL}?tenant=unknown").content


@pytest.mark.parametrize("header", ["Basic b3A6b3A=", "Bearer sk-mr-made-up", "Bearer \xff", "Bearer", ""])
def test_invalid_keys_are_rejected(client, header):
    response = get(client, Authorization=header)
    assert response.status_code == 401
    assert response["www-authenticate"] == "Bearer"
    assert response["content-type"] == "application/problem+json"
    problem = response.json()
    assert (problem["type"], problem["title"], problem["status"]) == ("about:blank", "Unauthorized", 401)
    assert problem["detail"]


def test_revoked_and_expired_keys_are_rejected(client, acme):
    key, secret = key_of(acme)
    actions.do_revoke_api_key(key)
    assert get(client, Authorization=f"Bearer {secret}").status_code == 401
    key, secret = key_of(acme)
    with tenant_scope(acme):
        ApiKey.objects.for_tenant(acme).filter(pk=key.pk).update(expires_at=datetime.now(UTC) - timedelta(seconds=1))
    assert get(client, Authorization=f"Bearer {secret}").status_code == 401


def test_a_key_without_the_scope_is_rejected(client, acme):
    _, secret = key_of(acme, "inference", "models")
    response = get(client, Authorization=f"Bearer {secret}")
    assert response.status_code == 403
    assert "'manage'" in response.json()["detail"]


def test_a_suspended_tenant_is_rejected(client, acme):
    _, secret = key_of(acme)
    actions.do_suspend_tenant(acme)
    response = get(client, Authorization=f"Bearer {secret}")
    assert response.status_code == 403
    assert "suspended" in response.json()["detail"]
