"""Clients of the management API, and a tenant with one object of each type."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any, NamedTuple

from rest_framework.test import APIClient

from billing.budgets.budgets import do_make_budget
from billing.payments.recording import Received, do_record_payment
from millrace.apps.alerts.actions import do_create_alert_rule
from millrace.apps.alerts.models import AlertRule, RuleAlert
from millrace.apps.request_log.models import RequestRecord
from tenants import actions
from tenants.actions.credentials import do_create_credential
from tenants.actions.listeners import do_open_listener
from tenants.actions.webhooks import do_create_endpoint, do_send_test_event
from tenants.isolation.scopes import tenant_scope
from tenants.models import (
    AuditEntry,
    Project,
    Tenant,
    TenantJob,
    User,
)
from tests.support.billing.books import draft_for
from tests.support.rows import of

BODY = {"models": ["smollm2-135m"]}
EXPERIMENT_ARMS = [{"name": "a", "share": 50}, {"name": "b", "share": 50, "model": "smollm2-135m"}]


class Row(NamedTuple):
    """A tenant with one object of each type."""

    tenant: Tenant
    ids: dict[str, int | str]


def furnished(slug: str) -> Row:
    owner = User.objects.create_user(f"owner@{slug}.example")
    tenant = actions.do_create_tenant(slug, slug.title(), owner=owner)
    spare = actions.do_create_project(tenant, "spare", "Spare")
    key, _ = actions.do_create_api_key(only_default(tenant), "k")
    member = actions.do_add_member(tenant, User.objects.create_user(f"dev@{slug}.example"), "developer")
    invitation = actions.do_invite(tenant, f"new@{slug}.example", "billing")
    limits = actions.do_set_limits(tenant, {"concurrency": 1}, key=key)
    policy = actions.do_publish_policy(tenant, "fast", BODY, check_targets=False)
    experiment = actions.do_create_experiment(
        tenant, name="cheaper", model="fast", arms=EXPERIMENT_ARMS, primary_metric="cost", guardrails={}
    )
    draft = actions.do_save_policy_draft(tenant, "fast", BODY)
    invoice = draft_for(tenant).pk
    budget = do_make_budget(tenant, name=f"of {slug}", unit="money", period="month", amount=1)
    payment = do_record_payment(Received("manual", f"of {slug}", 100, datetime.now(UTC), tenant=slug))[0].pk
    endpoint, _ = do_create_endpoint(tenant, f"https://hooks.{slug}.example/")
    delivery = do_send_test_event(endpoint)
    listener, _ = do_open_listener(tenant, "http://localhost:3000/hooks", "laptop")
    credential = do_create_credential(tenant, "own", f"sk-{slug}", model_names=["remote"])
    rule, alert = _alerting(tenant)
    with tenant_scope(tenant):
        job = TenantJob.objects.create(tenant=tenant, kind="tests.none", permission="tenant.read", actor={})
    ids: dict[str, int | str] = {
        "api-alert-rule": rule.pk,
        "api-rule-alert-acknowledge": alert.pk,
        "api-request": record_of(tenant).request_id,
        **dict.fromkeys(("api-budget", "api-budget-alerts", "api-budget-forecast"), budget.pk),
        **dict.fromkeys(("api-webhook", "api-webhook-rotate", "api-webhook-test"), endpoint.pk),
        **dict.fromkeys(("api-webhook-delivery", "api-webhook-replay"), delivery.pk),
        **dict.fromkeys(("api-credential", "api-credential-rotate"), credential.pk),
        "api-webhook-event": delivery.event_id,
        "api-webhook-listener-poll": listener.pk,
        **dict.fromkeys(("api-invoice", "api-invoice-pdf", "api-invoice-html", "api-invoice-csv"), invoice),
        **dict.fromkeys(("api-invoice-events", "api-invoice-check", "api-invoice-pay", "api-invoice-xml"), invoice),
        **dict.fromkeys(("api-payment", "api-payment-receipt"), payment),
        "api-project": spare.pk,
        "api-key": key.pk,
        "api-key-rotate": key.pk,
        "api-member": member.pk,
        "api-invitation": invitation.pk,
        "api-limits-detail": limits.pk,
        "api-policy": policy.pk,
        **dict.fromkeys(("api-experiment", "api-experiment-results"), experiment.pk),
        **dict.fromkeys(("api-experiment-start", "api-experiment-stop"), experiment.pk),
        **dict.fromkeys(("api-policy-revert", "api-policy-diff"), policy.pk),
        **dict.fromkeys(("api-policy-draft", "api-policy-draft-publish"), draft.pk),
        **dict.fromkeys(("api-job", "api-job-result"), job.pk),
        "api-audit-entry": of(AuditEntry, tenant)[0].pk,
    }
    return Row(tenant, ids)


def _alerting(tenant: Tenant) -> tuple[AlertRule, RuleAlert]:
    """Return an alert rule and its open alert."""
    rule = do_create_alert_rule(tenant, metric="error_rate", threshold=500)
    now = datetime.now(UTC)
    fields = {"rule": rule, "summary": "Errors", "threshold": 500, "created_at": now, "last_seen_at": now}
    with tenant_scope(tenant):
        return rule, RuleAlert.objects.create(tenant=tenant, **fields)


def record_of(tenant: Tenant) -> RequestRecord:
    fields = {"tenant_id": tenant.pk, "request_id": f"req_of_{tenant.slug}", "project_id": 1, "key_id": 1}
    fields |= {
        "gateway_id": "gw",
        "endpoint": "chat.completions",
        "requested_model": "m",
        "served_model": "m",
        "stream": False,
    }
    fields |= {"status": "200", "code": "", "outcome": "completed", "total_ms": 7, "started_at": datetime.now(UTC)}
    with tenant_scope(tenant):
        return RequestRecord.objects.create(**fields)


def only_default(tenant: Tenant) -> Project:
    (project,) = of(Project, tenant, slug="default")
    return project


def by_key(tenant: Tenant) -> APIClient:
    _, secret = actions.do_create_api_key(only_default(tenant), "manage", scopes=["manage"])
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    return client


def reauthenticated(client: APIClient, at: float | None = None, method: str = "password", **details: Any) -> APIClient:
    """Record a proof of identity, by default now."""
    session = client.session
    session["account_authentication_methods"] = [{"method": method, "at": at or time.time(), **details}]
    session["account_authentication_methods_user"] = session["_auth_user_id"]
    session.save()
    return client


def by_person(user: User) -> APIClient:
    client = APIClient()
    client.force_login(user)
    return reauthenticated(client)


def by_role(tenant: Tenant, role: str) -> APIClient:
    user = User.objects.create_user(f"{role}-{tenant.slug}@example.com")
    actions.do_add_member(tenant, user, role)
    return by_person(user)
