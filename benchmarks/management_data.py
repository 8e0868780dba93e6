"""The tenants of `benchmarks.management`, one with much data, and its most expensive requests. Needs Django."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks.console import SQL
from tenants.routing_policies.policy import MAX_RULES, MAX_TARGETS
from tests.support.frontend.console import DEMO, load_screens

DAYS = 31
KEYS = 500
MODELS = ["llama-70b", "qwen-8b", "smollm2-135m"]
PROMPT_CHARACTERS = 63_000  # stored prompts are cut at 65,536
# The newest requests of a model with a stored prompt and with feedback.
_CONTENTS = """
WITH newest AS (
    SELECT tenant_id, request_id, key_id, started_at FROM request_log_requestrecord
    WHERE tenant_id = %(tenant)s AND requested_model = 'llama-70b' AND outcome = 'completed'
    ORDER BY started_at DESC LIMIT %(prompts)s
), given AS (
    INSERT INTO feedback_submittedfeedback (tenant_id, request_id, key_id, success)
    SELECT tenant_id, request_id, key_id, true FROM newest
)
INSERT INTO request_log_requestcontent (tenant_id, request_id, started_at, body, answers, truncated)
SELECT tenant_id, request_id, started_at,
    '{"messages": [{"role": "user", "content": "' || repeat('Some words of a question. ', %(size)s / 26) || '"}]}',
    '[]', false
FROM newest
"""
# The parameters of the most expensive request, by URL name. Others have the first of DEFAULTS that is valid.
_MODELS = {"model": "llama-70b", "weak": "llama-70b", "strong": "qwen-8b"}


def _parameters(now: datetime) -> tuple[Mapping[str, Mapping[str, str]], tuple[Mapping[str, str], ...]]:
    period = {"from": (now - timedelta(days=DAYS)).isoformat(), "to": now.isoformat()}
    return {
        "api-requests-outcomes": _MODELS | period,
        "api-requests-success": period | {"group_by": "key"},
        "api-requests-rates": period | {"bucket": "hour"},
        "api-policy-shadow-results": period | {"name": "llama-70b"},
        "api-usage": period | {"group_by": "key,model"},
    }, (period | {"limit": "200"}, period, {"limit": "200"}, {})


def largest_policy() -> dict[str, Any]:
    """Return a policy with the most rules and targets. All conditions of a rule but the last match each request."""
    metadata = {f"field{number}": ["another"] for number in range(8)}
    when = {"prompt_tokens": {"at_least": 1}, "hours": {"start": "00:00", "end": "23:59"}, "metadata": metadata}
    others = [f"model-{number}" for number in range(MAX_TARGETS - len(MODELS))]
    targets = [{"model": model} for model in (*MODELS, *others)]
    rules = [{"when": when, "strategy": "cheapest", "targets": targets} for _ in range(MAX_RULES - 1)]
    return {"rules": [*rules, {"strategy": "cheapest", "targets": targets}]}


def fill(requests: int, prompts: int) -> dict[str, Any]:
    """Create the tenants and return the secret of the large one's key, the sessions of users, and the requests.

    A request has a name, its path with the query string, and its body if it is sent by POST.
    """
    from tenants import actions
    from tests.support.tenants.management_api import furnished, only_default

    logging.disable(logging.WARNING)  # warnings about requests with invalid parameters
    now = datetime.now(UTC)
    large, small = furnished("large"), actions.do_create_tenant("small", "Small")
    members = {tenant.slug: _sign_in_owner(tenant) for tenant in (large.tenant, small)}
    _insert_requests([only_default(small), only_default(large.tenant)], requests, prompts, now)
    _build_rollups()
    _, secret = actions.do_create_api_key(only_default(large.tenant), "manage", scopes=["manage"])
    return {
        "key": secret,
        "sessions": {slug: client.session.session_key for slug, client in members.items()},
        "operations": dict(_operations(large, secret, now)),
        "pages": dict(_pages(large.tenant, members["large"])),
    }


def _sign_in_owner(tenant: Any) -> Any:
    """Create an owner of the tenant, and return the owner's client with a recent reauthentication."""
    from django.test import Client

    from tenants import actions
    from tenants.models import User
    from tests.support.frontend.console import remembered

    user = User.objects.create_user(f"member@{tenant.slug}.example", "a long password")
    actions.do_add_member(tenant, user, "owner")
    client = Client()
    client.force_login(user)
    remembered(client.session)
    return client


def _insert_requests(projects: Sequence[Any], requests: int, prompts: int, now: datetime) -> None:
    """Insert keys, and the records and usage of the requests. The last project gets most, and the stored prompts."""
    from django.db import connection

    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope
    from tenants.models import ApiKey

    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        keys = ApiKey.objects.all_tenants().bulk_create(
            ApiKey(
                tenant=project.tenant,
                project=project,
                name=f"Key {number}",
                prefix=f"sk-mr-{number:06}",
                key_hash=f"{project.pk}.{number}".encode().ljust(32, b"."),
                scopes=["inference"],
            )
            for project, count in zip(projects, (10, KEYS), strict=True)
            for number in range(count)
        )
        months = sorted({(now - timedelta(days=ago)).date().replace(day=1) for ago in range(DAYS + 1)})
        cursor.execute("SELECT billing_create_partitions(%s)", [months])
        values = {
            "end": now,
            "span": timedelta(days=DAYS),
            "requests": requests,
            "tenants": 2,
            "tenant_ids": [project.tenant_id for project in projects],
            "project_ids": [project.pk for project in projects],
            "first_keys": [keys[0].pk, keys[10].pk],
            "models": MODELS,
            "big": 10,
            "small": KEYS,
        }
        cursor.execute((SQL / "requests.sql").read_text(encoding="utf-8"), values)
        events = (SQL / "usage_events.sql").read_text(encoding="utf-8")
        cursor.execute(events.replace("<> 'limited'", "<> 'limited' AND prompt_tokens IS NOT NULL"))
        cursor.execute(_CONTENTS, {"tenant": projects[-1].tenant_id, "prompts": prompts, "size": PROMPT_CHARACTERS})


def _build_rollups() -> None:
    from django.db import connections

    from billing.metering import rollups
    from millrace.apps.request_log import request_rollups

    with connections["owner"].cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")  # without statistics, the rollups take minutes
    connections["owner"].close()
    rollups.build()
    request_rollups.build(wait=timedelta(0))


def _operations(large: Any, secret: str, now: datetime) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each operation of the management API that a key may call and that stores nothing, with its most expensive
    parameters.
    """
    from django.urls import reverse
    from django.utils.http import urlencode
    from rest_framework.test import APIClient

    from millrace.apps.policy_results.policy_dry_runs import MAX_REQUESTS
    from tests.support.frontend.routes import all_routes

    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    policy = largest_policy()
    for name, body in {
        "api-policy-validate": {"body": policy},
        "api-policy-dry-run": {"body": policy, "requests": MAX_REQUESTS},
    }.items():
        path = reverse(name)
        response = client.post(path, body, format="json")
        assert response.status_code == 200, response.json()
        yield name, (path, json.dumps(body))
    special, defaults = _parameters(now)
    for route in all_routes():
        if not route.is_api or not route.is_of_tenant or not hasattr(route.view, "cls"):
            continue
        path = "/" + re.sub(r"<\w+:\w+>", str(large.ids.get(route.name, "0")), route.pattern)
        for query in (special[route.name],) if route.name in special else defaults:
            if client.get(path, query).status_code == 200:
                yield route.name, (f"{path}?{urlencode(query)}", "")
                break


def _pages(tenant: Any, client: Any) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield each page of the tenant's console, and each part that a page loads afterwards."""
    from tenants.isolation.scopes import tenant_scope

    for screen in load_screens():
        if screen.who != "owner" or "{slug}" not in screen.url:
            continue
        try:
            with tenant_scope(tenant):
                values = {name: DEMO[name](tenant) for name in set(re.findall(r"{(\w+)}", screen.url)) - {"slug"}}
        except Exception:  # noqa: S112, BLE001  (the database lacks the object of this page)
            continue
        path = screen.url.format(slug=tenant.slug, **values)
        page = client.get(path)
        if page.status_code != 200:
            continue
        yield screen.name, (path, "")
        text = page.content.decode(errors="replace")
        for part, url in re.findall(r'id="panel-([\w-]+)" hx-get="([^"]+)" hx-trigger="load', text):
            yield f"{screen.name}: {part}", (url.replace("&amp;", "&"), "")
