"""Screens of the request log: completed, limited, dry-run, refused and failed requests, and the details of one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from tests.support.frontend.console import Screen, World, meter, register

BOUND = {"kind": "limit", "scope": "key", "id": 3, "name": "requests_per_minute", "model": "", "limit": 3, "left": 0}
LIMIT = {"set": 3, "scope": "key", "model": "", "name": "requests_per_minute", "limit": 3, "left": 2, "cost": 1}
PLACE = {"execution": 0, "attempt": 1, "model": "smollm2-135m", "replica": "r", "by": "prefix", "load": 1, "credits": 9}
ROUTE = {"policy": {"version": 2, "rule": 0, "draw": 1}, "targets": ["smollm2-135m", "big"]}
SKIPPED = {"skipped": [{"model": "big", "reason": "server_is_overloaded"}]}


def prepare(world: World) -> None:
    for state in ("populated", "over"):
        _fill(world, state)


def _fill(world: World, state: str) -> None:
    from billing.models import BudgetPeriod  # here: Django is not set up on import
    from millrace.apps.request_log.models import RequestContent, RequestRecord
    from tenants import actions
    from tenants.isolation.scopes import tenant_scope

    tenant, now, key = world.tenants[state], datetime.now(UTC), world.keys[state][0]
    common: dict[str, Any] = {"project_id": world.projects[state].pk, "key_id": key.pk, "gateway_id": "gw-1"}
    counts = {"uncached": 700, "cache_read": 300, "output": 120, "ttft_us": 90_000, "queue_us": 9_000}
    name = meter(
        tenant,
        at=now - timedelta(seconds=2),
        duration_us=900_000,
        miss_reason="prefix_changed",
        changed_at=300,
        price_version=world.price_version,
        project_id=common["project_id"],
        key_id=key.pk,
        **counts,
    )
    answered = {"status": "200", "code": "", "outcome": "completed", "served_model": "smollm2-135m", "ttft_ms": 95}
    limited = {
        "status": "429",
        "code": "rate_limit_exceeded",
        "outcome": "limited",
        "served_model": "",
        "limited_by": BOUND,
    }
    rows: list[dict[str, Any]] = [
        {
            **answered,
            "request_id": name,
            "limits": [LIMIT, {**LIMIT, "name": "tokens_per_day", "dry": True, "refused": True}],
            "budget_periods": [],
            "route": ROUTE | SKIPPED,
            "placements": [{**PLACE, "queued_ms": 4}],
            "prompt_tokens": 1000,
            "max_tokens": 200,
            "reserved_nano": 6_750_000,
        },
        {**limited, "request_id": f"req_limited_{state}", "limits": [{**LIMIT, "left": 0, "refused": True}]},
        {**answered, "request_id": f"req_replay_{state}", "replay_of": name},
        {"request_id": f"req_bad_{state}", "status": "400", "code": "invalid_value", "outcome": "refused"},
        {"request_id": f"req_lost_{state}", "status": "stream_worker_lost", "code": "worker_lost", "outcome": "failed"},
    ]
    actions.do_update_settings(tenant, content_retention_days=7)
    tenant.content_retention_days = 7
    with tenant_scope(tenant):
        if windows := list(BudgetPeriod.objects.for_tenant(tenant)[:1]):
            rows[0]["budget_periods"] = [windows[0].pk]
        RequestRecord.objects.for_tenant(tenant).bulk_create(
            RequestRecord(
                **{
                    "tenant_id": tenant.pk,
                    "started_at": now - timedelta(seconds=2 + 10 * place),
                    **{
                        "endpoint": "chat.completions",
                        "requested_model": "mine",
                        "served_model": "",
                        "stream": True,
                        "total_ms": 905,
                    },
                    **common,
                    **row,
                }
            )
            for place, row in enumerate(rows)
        )
        RequestContent.objects.create(
            tenant_id=tenant.pk,
            request_id=name,
            started_at=now,
            body='{"model": "mine"}',
            answers=["Yes."],
            truncated=False,
        )
    world.rows[f"{state}.request"] = name
    world.rows[f"{state}.limited"] = f"req_limited_{state}"


def _newest(tenant: Any, outcome: str) -> str:
    from millrace.apps.request_log.selectors import Filters, requests_page

    page = requests_page(Filters(tenant.pk, outcome=outcome), size=1)
    return page.rows[0].record.request_id


register(
    Screen("requests", "/t/{slug}/requests/", queries=30),
    Screen("requests-limited", "/t/{slug}/requests/?outcome=limited&range=7d", queries=26, states=("populated",)),
    Screen("requests-detail", "/t/{slug}/requests/{request}", queries=26, states=("populated", "over")),
    Screen("requests-refused", "/t/{slug}/requests/{limited}", queries=20, states=("populated",)),
    prepare=prepare,
    theirs={"name": lambda world: world.rows["populated.request"]},
    demo={"request": partial(_newest, outcome="completed"), "limited": partial(_newest, outcome="limited")},
)
