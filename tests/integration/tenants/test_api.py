"""The management API: its functions, permissions and isolation of tenants."""

from __future__ import annotations

import json
import re
import time
from datetime import timedelta
from typing import Any

import pytest
from django.urls import get_resolver
from rest_framework.test import APIClient

from tenants import actions
from tenants.api.operators import OperatorView
from tenants.api.views import TenantView
from tenants.models import ApiKey, AuditEntry, Invitation, LimitSet, Membership, Project, User
from tenants.permissions import KEY, ROLES, STEP_UP, Permission
from tests.support.rows import unscoped
from tests.support.tenants.management_api import (
    BODY,
    EXPERIMENT_ARMS,
    by_key,
    by_person,
    by_role,
    furnished,
    only_default,
    reauthenticated,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("all_models_served")]


@pytest.fixture
def client(furnished_acme) -> APIClient:
    return by_key(furnished_acme.tenant)


# Functions


def test_the_tenant(client, furnished_acme):
    assert client.get("/api/tenant").json()["slug"] == "acme"
    assert client.patch("/api/tenant", {"name": "Acme Ltd"}).json()["name"] == "Acme Ltd"
    assert client.delete("/api/tenant").status_code == 403
    owner = by_role(furnished_acme.tenant, "owner")
    assert owner.delete("/api/tenant").status_code == 204
    assert owner.get("/api/tenant").json()["purge_after"]
    assert client.get("/api/tenant").status_code == 403  # its keys are rejected
    assert owner.post("/api/tenant/restore").json()["purge_after"] is None


def test_projects(client, furnished_acme):
    response = client.post("/api/projects", {"slug": "lab", "name": "Lab"})
    assert response.status_code == 201, response.content
    url = f"/api/projects/{response.json()['id']}"
    assert client.patch(url, {"name": "Laboratory"}).json()["name"] == "Laboratory"
    assert [row["slug"] for row in client.get("/api/projects").json()["results"]] == ["lab", "spare", "default"]
    assert [row["slug"] for row in client.get("/api/projects?slug=lab").json()["results"]] == ["lab"]
    assert client.post("/api/projects", {"slug": "lab", "name": "Again"}).status_code == 409
    for name, slug in (("Lab", "lab-2"), ("Übung 7", "ubung-7"), ("試験", "project"), ("試験", "project-2")):
        assert client.post("/api/projects", {"name": name}).json()["slug"] == slug
    assert client.post("/api/projects", {"name": "a" * 200}).json()["slug"] == "a" * 50
    assert client.post("/api/projects", {"name": "a" * 200}).json()["slug"] == "a" * 48 + "-2"
    assert client.delete(url).status_code == 204
    assert client.get(url).status_code == 404
    assert client.delete(f"/api/projects/{only_default(furnished_acme.tenant).pk}").status_code == 409


def test_keys(client, furnished_acme, row):
    sent = {"name": "web", "scopes": ["inference"], "allowed_ip_ranges": ["10.0.0.1"], "allowed_models": ["m"]}
    response = client.post("/api/keys", sent)
    assert response.status_code == 201, response.content
    secret, key = response.json().pop("secret"), response.json()
    assert row(secret).allowed_ip_ranges == ("10.0.0.1/32",)
    assert (key["live"], key["last_used_at"], key["project_id"]) == (True, None, only_default(furnished_acme.tenant).pk)
    url = f"/api/keys/{key['id']}"
    assert "secret" not in client.get(url).json()
    assert client.patch(url, {"allowed_models": None}).json()["allowed_models"] is None
    new = client.post(f"{url}/rotate", {"overlap_hours": 1}).json()
    assert new["replaces_id"] == key["id"]
    assert row(new["secret"]).models is None
    assert client.delete(url).status_code == 204
    assert row(secret).revoked
    assert not client.get(url).json()["live"]
    ids = [found["id"] for found in client.get("/api/keys", {"live": "false"}).json()["results"]]
    assert ids == [key["id"]]
    assert key["id"] not in [found["id"] for found in client.get("/api/keys?live=true").json()["results"]]
    assert client.patch(url, {"name": "x"}).status_code == 409


def test_the_cost_center_of_a_key(client):
    key = client.post("/api/keys", {"name": "web", "cost_center": "4711"}).json()
    assert key["cost_center"] == "4711"
    url = f"/api/keys/{key['id']}"
    for wrong in ("x" * 61, "a\tb", "a\r\nb", "a\0b", None, ["a"]):
        refused = client.patch(url, {"cost_center": wrong})
        assert (refused.status_code, list(refused.json()["errors"])) == (400, ["cost_center"]), wrong
    assert client.patch(url, {"cost_center": "R&D"}).json()["cost_center"] == "R&D"
    assert client.patch(url, {"cost_center": ""}).json()["cost_center"] == ""


def test_members_and_invitations(client, furnished_acme):
    found = client.get("/api/members?role=developer").json()["results"]
    assert [(member["email"], member["role"]) for member in found] == [("dev@acme.example", "developer")]
    url = f"/api/members/{furnished_acme.ids['api-member']}"
    assert client.patch(url, {"role": "billing"}).json()["role"] == "billing"
    assert client.patch(url, {"role": "owner"}).status_code == 403
    assert client.delete(url).status_code == 204
    response = client.post("/api/invitations", {"email": "dev@acme.example", "role": "admin"})
    assert response.status_code == 201, response.content
    assert set(response.json()) == {
        *("id", "email", "role", "created_at", "expires_at", "accepted_at", "revoked_at", "open"),
        *("delivery_state", "delivery_error"),
    }  # and never the link, since only the recipient of the email can accept
    assert client.post("/api/invitations", {"email": "x@acme.example", "role": "owner"}).status_code == 403
    assert client.delete(f"/api/invitations/{response.json()['id']}").status_code == 204
    revoked = client.get(f"/api/invitations/{response.json()['id']}").json()
    assert (revoked["open"], revoked["delivery_state"], revoked["delivery_error"]) == (False, None, None)


def test_only_an_owner_can_manage_owners(furnished_acme):
    owner = by_role(furnished_acme.tenant, "owner")
    url = f"/api/members/{furnished_acme.ids['api-member']}"
    assert owner.patch(url, {"role": "owner"}).json()["role"] == "owner"
    admin = by_role(furnished_acme.tenant, "admin")
    assert admin.patch(url, {"role": "billing"}).status_code == 403
    assert admin.delete(url).status_code == 403
    assert owner.delete(url).status_code == 204


def test_limits(client, furnished_acme):
    sent = {"key_id": furnished_acme.ids["api-key"], "requests_per_minute": 5, "model": "m"}
    row = client.post("/api/limits", sent)
    assert row.status_code == 200, row.content
    assert (row.json()["scope"], row.json()["requests_per_minute"]) == ("key", 5)
    assert client.post("/api/limits", sent | {"requests_per_minute": 6}).json()["id"] == row.json()["id"]
    assert len(client.get("/api/limits?model=m").json()["results"]) == 1
    assert client.delete(f"/api/limits/{row.json()['id']}").status_code == 204
    assert client.post("/api/limits", {"project_id": 10**9, "concurrency": 1}).status_code == 400
    imposed = actions.do_set_limits(furnished_acme.tenant, {"requests_per_day": 9}, set_by_operator=True)
    assert client.get(f"/api/limits/{imposed.pk}").json()["set_by_operator"]
    assert client.delete(f"/api/limits/{imposed.pk}").status_code == 403
    assert client.post("/api/limits", {"requests_per_day": 10**6, "set_by_operator": True}).status_code == 403
    operator = by_person(User.objects.create_superuser("op@example.com"))
    assert operator.post("/api/limits?tenant=acme", {"requests_per_day": 7, "set_by_operator": True}).status_code == 200
    assert operator.delete(f"/api/limits/{imposed.pk}?tenant=acme").status_code == 204


def test_policies(client, furnished_acme):
    response = client.post("/api/policies", {"name": "fast", "body": BODY})
    assert (response.status_code, response.json()["version"]) == (201, 2)
    back = client.post(f"/api/policies/{furnished_acme.ids['api-policy-revert']}/revert")
    assert (back.status_code, back.json()["version"]) == (201, 3)
    assert [row["version"] for row in client.get("/api/policies?active=true").json()["results"]] == [3]
    assert client.post("/api/policies", {"name": "fast", "body": {"wrong": 1}}).status_code == 400
    assert client.delete(f"/api/policies/{furnished_acme.ids['api-policy']}").status_code == 409
    assert client.delete(f"/api/policies/{back.json()['id']}").status_code == 204


def test_a_policy_is_published_over_its_base_version_only(client, furnished_acme):
    def publish(name: str, base_version: object) -> tuple[int, object]:
        response = client.post("/api/policies", {"name": name, "body": BODY, "base_version": base_version})
        return response.status_code, response.json().get("code", response.json().get("version"))

    assert publish("fast", 0) == (409, "version_conflict")
    assert publish("fast", 2) == (409, "version_conflict")
    assert publish("fast", 1) == (201, 2)
    assert publish("fast", 1) == (409, "version_conflict")
    assert publish("new", 0) == (201, 1)
    assert publish("fast", -1) == publish("fast", "x") == publish("fast", 10**30) == (400, "invalid")
    (active,) = client.get("/api/policies?name=fast&active=true").json()["results"]
    client.delete(f"/api/policies/{active['id']}")
    assert publish("fast", 0) == (201, 3)  # nothing is active, so nothing is replaced


def test_a_draft_is_saved_validated_compared_and_published(client, furnished_acme):
    invalid = {"rules": [{"targets": []}]}
    draft = client.post("/api/policy-drafts", {"name": "slow", "body": invalid}).json()
    assert "$.rules[0].targets" in draft["error"]
    assert client.post(f"/api/policy-drafts/{draft['id']}/publish").status_code == 400
    again = client.post("/api/policy-drafts", {"name": "slow", "body": BODY}).json()
    assert (again["id"], again["error"], again["based_on"]) == (draft["id"], "", None)
    first = client.post(f"/api/policy-drafts/{draft['id']}/publish").json()
    assert (first["version"], first["body"], first["active"]) == (1, BODY, True)
    assert client.get(f"/api/policy-drafts/{draft['id']}").status_code == 404

    second = client.post("/api/policies", {"name": "slow", "body": {"models": ["other"]}}).json()
    difference = client.get(f"/api/policies/{second['id']}/diff").json()
    assert difference["against"] == 1
    assert {"change": "+", "text": '  "models": ["other"]'} in difference["lines"]
    assert client.get(f"/api/policies/{first['id']}/diff").json()["against"] is None
    assert client.post("/api/policies/validate", {"body": invalid}).json()["valid"] is False
    assert client.post("/api/policies/validate", {"body": BODY}).json()["valid"] is True
    assert client.post("/api/policies/validate", {"body": {"models": ["x" * 70_000]}}).status_code == 400


def test_a_draft_is_not_published_over_a_version_that_it_does_not_contain(client, furnished_acme):
    draft = client.post("/api/policy-drafts", {"name": "fast", "body": BODY}).json()
    client.post("/api/policies", {"name": "fast", "body": {"models": ["other"]}})
    refused = client.post(f"/api/policy-drafts/{draft['id']}/publish")
    assert (refused.status_code, refused.json()["code"]) == (409, "version_conflict")
    assert client.delete(f"/api/policy-drafts/{draft['id']}").status_code == 204
    assert client.get("/api/policy-drafts?name=fast").json()["results"] == []


def test_the_audit_log(client, furnished_acme):
    key_id = furnished_acme.ids["api-key"]
    changed = client.patch(f"/api/keys/{key_id}", {"name": "other"})
    (entry,) = client.get("/api/audit", {"action": "key.updated", "object_id": key_id}).json()["results"]
    assert (entry["before"], entry["after"]) == ({"name": "k"}, {"name": "other"})
    assert entry["actor"].startswith("key sk-mr-")
    assert entry["ip_address"] == "127.0.0.1"
    assert entry["request_id"] == changed.headers["x-request-id"]
    assert client.get(f"/api/audit/{entry['id']}").json() == entry
    person = by_role(furnished_acme.tenant, "admin")
    person.patch(f"/api/keys/{key_id}", {"name": "third"})
    assert client.get("/api/audit").json()["results"][0]["actor"] == "admin-acme@example.com"


def test_operators(furnished_acme):
    client = by_person(User.objects.create_superuser("op@example.com"))
    response = client.post("/api/operator/tenants", {"slug": "lab", "name": "Lab", "owner_email": "o@lab.example"})
    assert response.status_code == 201, response.content
    url = f"/api/operator/tenants/{response.json()['id']}"
    assert [row.email for row in unscoped(Invitation).filter(tenant_id=response.json()["id"])] == ["o@lab.example"]
    assert client.patch(url, {"name": "Labs"}).json()["name"] == "Labs"
    assert client.post(f"{url}/suspend").json()["status"] == "suspended"
    assert client.post(f"{url}/resume").json()["status"] == "active"
    assert client.post(f"{url}/delete").json()["purge_after"]
    assert client.post(f"{url}/restore").json()["purge_after"] is None
    assert [row["slug"] for row in client.get("/api/operator/tenants").json()["results"]] == ["lab", "acme"]
    assert client.get("/api/operator/tenants?search=labs").json()["results"][0]["slug"] == "lab"
    assert client.get("/api/operator/models").json()[0]["name"] == "smollm2-135m"
    assert client.get("/api/operator/workers").status_code == 200


def test_an_operators_use_of_a_tenants_api_is_audited_once_an_hour(furnished_acme, monkeypatch):
    """The console requires a reason from operators. In the API, the tenant sees at least who, when and what."""
    operator = User.objects.create_superuser("op@example.com")
    client, member = by_person(operator), by_role(furnished_acme.tenant, "admin")
    actions.do_create_tenant("lab", "Lab")

    def noted() -> list[tuple[str, str, str]]:
        found = member.get("/api/audit?action=tenant.api_accessed").json()["results"]
        return [(row["actor"], row["object_name"], row["after"]["request"]) for row in found]

    assert client.get("/api/usage?tenant=lab").status_code == 200
    assert noted() == []  # neither the operator's own nor another tenant's
    assert client.get("/api/keys?tenant=acme").status_code == 200
    assert client.get("/api/usage?tenant=acme").status_code == 200
    assert noted() == [("op@example.com", str(furnished_acme.tenant), "GET /api/keys")]
    assert len(unscoped(AuditEntry).filter(action="tenant.api_accessed")) == 2
    monkeypatch.setattr("tenants.actions.tenancy.API_ACCESS_INTERVAL", timedelta(0))  # an hour later
    client.get("/api/usage?tenant=acme")
    assert [request for *_, request in noted()] == ["GET /api/usage", "GET /api/keys"]


# Permissions


def routes(base: type) -> dict[str, Any]:
    found = {}
    for pattern in get_resolver().url_patterns:
        for inner in getattr(pattern, "url_patterns", [pattern]):
            view = getattr(getattr(inner, "callback", None), "cls", None) or getattr(
                getattr(inner, "callback", None), "view_class", None
            )
            if isinstance(view, type) and issubclass(view, base):
                found[str(inner.name)] = (f"/{pattern.pattern}{inner.pattern}", view)
    return found


def url_of(route: str, ids: dict[str, int | str]) -> str:
    path, _ = routes(TenantView)[route]
    return re.sub("<[^>]*>", str(ids.get(route, 0)), path)


SENT = {
    "api-top-ups": {"cents": 500},
    "api-tenant": {"name": "x"},
    "api-projects": {"slug": "lab", "name": "Lab"},
    "api-project": {"name": "x"},
    "api-keys": {"name": "x"},
    "api-key": {"name": "x"},
    "api-member": {"role": "billing"},
    "api-invitations": {"email": "y@example.com", "role": "billing"},
    "api-limits": {"concurrency": 1},
    "api-budgets": {"name": "x", "unit": "money", "period": "month", "amount": 1},
    "api-budget": {"amount": 2},
    "api-alert-rules": {"metric": "error_rate", "threshold": 500},
    "api-alert-rule": {"threshold": 400},
    "api-experiments": {"name": "n", "model": "m", "arms": EXPERIMENT_ARMS},
    "api-notifications-read": {"ids": [1]},
    "api-policies": {"name": "x", "body": BODY},
    "api-policy-drafts": {"name": "x", "body": BODY},
    "api-policy-validate": {"body": BODY},
    "api-policy-dry-run": {"body": BODY},
    "api-webhooks": {"url": "https://hooks.example/"},
    "api-webhook": {"description": "x"},
    "api-webhook-listeners": {"url": "http://localhost:3000/hooks", "device": "laptop"},
    "api-webhook-listener-poll": {"results": []},
    "api-credentials": {"name": "x", "secret": "sk-x", "models": ["x"]},
    "api-credential": {"name": "y"},
    "api-credential-rotate": {"secret": "sk-y"},
}
QUERIES = {"api-requests-outcomes": "?model=x&weak=y&strong=z", "api-policy-shadow-results": "?name=x"}
TRIED = [
    (route, method, needed)
    for route, (_, view) in routes(TenantView).items()
    for method, needed in view.permissions.items()
]


def test_every_route_declares_its_permission():
    """A handler without a permission would be open to every member."""
    for route, (_, view) in routes(TenantView).items():
        handlers = {name.upper() for name in ("get", "post", "put", "patch", "delete") if hasattr(view, name)}
        assert handlers == set(view.permissions), route
    assert len(TRIED) > 25
    assert {needed for _, _, needed in TRIED} >= set(Permission) - {*(Permission.OWNERS_WRITE, Permission.KEYS_MANAGE)}


@pytest.mark.parametrize("role", [*ROLES, "key"])
def test_roles_have_the_permissions_of_the_table(role, furnished_acme):
    client = by_key(furnished_acme.tenant) if role == "key" else by_role(furnished_acme.tenant, role)
    permissions = KEY if role == "key" else ROLES[role]
    for route, method, needed in TRIED:
        if method == "DELETE":
            continue  # tested below, since the next role could not test a deleted object
        url = url_of(route, furnished_acme.ids) + QUERIES.get(route, "")
        response = client.generic(method, url, **_body(SENT.get(route)))
        assert (response.status_code == 403) is (needed not in permissions), (route, method, response.content)
        assert response.status_code in (200, 201, 403, 409), (route, method, response.content)
    for route, method, needed in TRIED:
        if method == "DELETE" and needed not in permissions:
            assert client.delete(url_of(route, furnished_acme.ids)).status_code == 403, route


def _body(data: object) -> dict[str, Any]:
    return {"data": json.dumps(data or {}), "content_type": "application/json"}


WITH_ID = [route for route, (path, _) in routes(TenantView).items() if "<" in path]


@pytest.mark.parametrize("route", WITH_ID)
def test_other_tenants_objects_return_404(route, furnished_acme):
    """By any ID, with any method, for keys, members and owners: 404, as for objects that do not exist.

    A caller without the permission receives a 403 for every ID.
    """
    other = furnished("other")
    callers = [(by_key(furnished_acme.tenant), KEY), (by_role(furnished_acme.tenant, "owner"), ROLES["owner"])]
    before = {model: sorted(map(repr, unscoped(model).values())) for model in (ApiKey, Membership, LimitSet, Project)}
    for client, permissions in callers:
        for method, needed in routes(TenantView)[route][1].permissions.items():
            answers = []
            for pk in (other.ids[route], 2**62):
                url = url_of(route, {route: pk})
                answers.append(client.generic(method, url, **_body(SENT.get(route))))
                assert client.generic(method, f"{url}?tenant=other", **_body(SENT.get(route))).status_code == 404
            expected = 404 if needed in permissions else 403
            assert [answer.status_code for answer in answers] == [expected] * 2, (method, answers[0].content)
            assert answers[0].content == answers[1].content
    assert before == {model: sorted(map(repr, unscoped(model).values())) for model in before}


def test_lists_contain_no_rows_of_other_tenants(furnished_acme):
    other = furnished("other")
    client = by_key(furnished_acme.tenant)
    for route, (path, view) in routes(TenantView).items():
        if "<" not in path and "GET" in view.permissions:
            assert "other" not in client.get(path).content.decode(errors="replace"), route  # also files
            assert client.get(f"{path}?tenant=other").status_code == 404, route
    assert client.get("/api/keys", {"project": only_default(other.tenant).pk}).json()["results"] == []


def test_ids_of_other_tenants_in_a_body_are_rejected(furnished_acme):
    other = furnished("other")
    client = by_key(furnished_acme.tenant)
    assert client.post("/api/keys", {"name": "x", "project_id": only_default(other.tenant).pk}).status_code == 400
    assert client.post("/api/limits", {"key_id": other.ids["api-key"], "concurrency": 1}).status_code == 400
    assert client.post("/api/limits", {"project_id": other.ids["api-project"], "concurrency": 1}).status_code == 400


def test_operator_routes_return_404_for_others(furnished_acme):
    owner = by_role(furnished_acme.tenant, "owner")
    found = routes(OperatorView)
    assert len(found) >= 20
    for path, view in found.values():
        url = path.replace("<int:pk>", str(furnished_acme.tenant.pk))
        for method in ("get", "post", "patch"):
            if hasattr(view, method):
                assert owner.generic(method.upper(), url, **_body({"name": "x"})).status_code == 404, url
                assert by_key(furnished_acme.tenant).generic(method.upper(), url, **_body({})).status_code in (401, 403)
                assert APIClient().generic(method.upper(), url).status_code in (401, 403)


def test_without_a_key_or_session_requests_are_rejected(furnished_acme):
    for path, _ in routes(TenantView).values():
        assert APIClient().get(re.sub("<[^>]*>", "1", path)).status_code == 401


# Reauthentication


def test_creating_a_key_requires_reauthentication(furnished_acme):
    client = by_role(furnished_acme.tenant, "admin")
    assert client.post("/api/keys", {"name": "x"}).status_code == 201
    reauthenticated(client, at=time.time() - 301)
    response = client.post("/api/keys", {"name": "y"})
    assert (response.status_code, response.json()["code"]) == (403, "reauthentication_required")
    assert client.get("/api/keys").status_code == 200
    assert client.post("/api/projects", {"slug": "free", "name": "Free"}).status_code == 201
    assert Permission.PROJECTS_WRITE not in STEP_UP


def test_users_with_totp_must_reauthenticate_with_it(furnished_acme):
    from allauth.mfa.totp.internal.auth import TOTP, generate_totp_secret

    client = by_role(furnished_acme.tenant, "admin")
    totp = TOTP.activate(User.objects.get(email="admin-acme@example.com"), generate_totp_secret())
    assert client.post("/api/keys", {"name": "x"}).json()["code"] == "reauthentication_required"
    reauthenticated(client, method="mfa", id=totp.instance.pk + 1)  # of a device that the user does not have
    assert client.post("/api/keys", {"name": "x"}).json()["code"] == "reauthentication_required"
    reauthenticated(client, method="mfa", id=totp.instance.pk)
    assert client.post("/api/keys", {"name": "x"}).status_code == 201


def test_a_recent_login_counts_as_reauthentication(furnished_acme):
    user = User.objects.create_user("real@example.com", "correct horse battery staple")
    actions.do_add_member(furnished_acme.tenant, user, "admin")
    client = APIClient()
    assert client.post("/login", {"login": user.email, "password": "wrong"}, format="multipart").status_code == 200
    client.post("/login", {"login": user.email, "password": "correct horse battery staple"}, format="multipart")
    assert client.post("/api/keys", {"name": "x"}).status_code == 201


def test_a_key_cannot_create_management_keys(client, furnished_acme):
    """Revoking a leaked key with the scope `manage` must suffice, so it cannot create other such keys."""
    sent = {"name": "x", "scopes": ["manage"]}
    assert client.post("/api/keys", sent).status_code == 403
    assert client.patch(f"/api/keys/{furnished_acme.ids['api-key']}", {"scopes": ["manage"]}).status_code == 403
    (mine,) = [row for row in client.get("/api/keys").json()["results"] if row["scopes"] == ["manage"]]
    assert client.post(f"/api/keys/{mine['id']}/rotate", {}).status_code == 201
    other, _ = actions.do_create_api_key(only_default(furnished_acme.tenant), "m2", scopes=["manage"])
    assert client.post(f"/api/keys/{other.pk}/rotate", {}).status_code == 403
    assert by_role(furnished_acme.tenant, "developer").post("/api/keys", sent).status_code == 403
    assert by_role(furnished_acme.tenant, "admin").post("/api/keys", sent).status_code == 201


def test_a_key_with_the_scope_billing_has_the_permissions_of_that_role(furnished_acme):
    _, secret = actions.do_create_api_key(only_default(furnished_acme.tenant), "finance", scopes=["billing", "models"])
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    assert [client.get(f"/api/{path}").status_code for path in ("invoices", "ledger", "usage", "tenant")] == [200] * 4
    assert client.patch("/api/billing/profile", {"po_number": "PO-1"}).json()["po_number"] == "PO-1"
    for method, path in (
        ("get", "keys"),
        ("post", "keys"),
        ("patch", "tenant"),
        ("get", "audit"),
        ("post", "webhooks"),
    ):
        assert getattr(client, method)(f"/api/{path}", {"name": "x"}).status_code == 403, path
    assert client.get("/api/operator/entities").status_code in (401, 403)


@pytest.mark.parametrize("role", ["owner", "admin", "developer"])
def test_only_who_may_change_billing_grants_the_scope_billing(client, furnished_acme, role):
    """An admin, or a key with the scope `manage`, would give itself the permission by such a key."""
    caller, expected = by_role(furnished_acme.tenant, role), 201 if role == "owner" else 403
    sent = {"name": "finance", "scopes": ["inference", "billing"]}
    assert caller.post("/api/keys", sent).status_code == expected
    key, _ = actions.do_create_api_key(only_default(furnished_acme.tenant), "k", scopes=["billing"])
    other, _ = actions.do_create_api_key(only_default(furnished_acme.tenant), "o", scopes=["inference"])
    assert caller.post(f"/api/keys/{key.pk}/rotate", {}).status_code == expected
    assert caller.patch(f"/api/keys/{other.pk}", {"scopes": ["billing"]}).status_code == (
        200 if role == "owner" else 403
    )
    assert client.post("/api/keys", sent).status_code == 403
    assert client.post(f"/api/keys/{key.pk}/rotate", {}).status_code == 403
    assert client.patch(f"/api/keys/{key.pk}", {"name": "y"}).status_code == 403


# Invalid input


@pytest.mark.parametrize(
    ("url", "data"),
    [
        ("/api/projects", {"slug": "a b", "name": "x"}),
        ("/api/projects", {"slug": "a"}),
        ("/api/projects", {"slug": "a", "name": "x", "color": "red"}),
        ("/api/projects", {"slug": "a", "name": "x\x00"}),
        ("/api/projects", {"slug": "a", "name": "\ud800"}),
        ("/api/projects", []),
        ("/api/keys", {"name": "x", "scopes": ["root"]}),
        ("/api/keys", {"name": "x", "expires_at": "2020-01-01T00:00:00Z"}),
        ("/api/keys", {"name": "x", "project_id": 2**70}),
        ("/api/limits", {}),
        ("/api/limits", {"concurrency": -1}),
        ("/api/policies", {"name": "x", "body": {"models": ["\x00"]}}),
        ("/api/invitations", {"email": "unknown", "role": "admin"}),
    ],
)
def test_invalid_bodies_return_problems(client, url, data):
    response = client.generic("POST", url, json.dumps(data), "application/json")
    assert response.status_code == 400, response.content
    assert response["content-type"] == "application/problem+json"
    assert response.json()["status"] == 400


@pytest.mark.parametrize(
    "query", ["cursor=x", "cursor=cD1hYmM=", "limit=0", "limit=x", "color=red", "tenant=%00", "slug=%00"]
)
def test_invalid_queries_return_problems(client, query):
    assert client.get(f"/api/projects?{query}").status_code in (400, 404)


def test_lists_are_paged(client, furnished_acme):
    for number in range(5):
        actions.do_create_project(furnished_acme.tenant, f"p{number}", "P")
    found, url = [], "/api/projects?limit=3"
    while url:
        page = client.get(url).json()
        found += [row["slug"] for row in page["results"]]
        url = page["next"]
    assert found == ["p4", "p3", "p2", "p1", "p0", "spare", "default"]
