"""Tenants whose caches are warmed, and the stored requests that have prompts to warm."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

from millrace.apps.request_log.models import RequestContent
from tenants import actions
from tenants.isolation.scopes import tenant_scope
from tenants.models import ApiKey, Tenant
from tests.support.billing.books import make_months, rate_card
from tests.support.request_log.records import NOW, record, settle
from tests.support.rows import only_project, unscoped

HITS = {"answer_hit_input": "0.30", "answer_hit_output": "1.50"}
STANDARD = {"uncached": "3", "cache_read": "0.30", "output": "15", **HITS}
HALF = {"uncached": "1.50", "cache_read": "0.15", "output": "7.50"}
NANO = 10**9
COST = (100 * 1_500_000 + 40 * 7_500_000) * 1000  # femto-USD, of 100 tokens and an answer of 40, in the batch class
MAX_COST = (100 * 1_500_000 + 50 * 7_500_000) * 1000  # with 50 tokens, the maximum
SAVED = (100 * 2_700_000 + 40 * 13_500_000) * 1000  # of a hit
DAYS = range(1, 8)


class Asker:
    """Requests of a tenant's key in the request log."""

    def __init__(self, tenant: Tenant, now: datetime = NOW, **fields: Any) -> None:
        self.tenant = tenant
        self.now = now
        self.key: ApiKey = actions.do_create_api_key(only_project(tenant), "k")[0]
        self.count = 0
        self.fields = fields

    def ask(
        self,
        at: datetime,
        text: str = "Hello",
        *,
        stores: bool = True,
        usage: dict[str, int] | None = None,
        **fields: Any,
    ) -> str:
        """Record a computed request. Return its ID."""
        self.count += 1
        name = f"req_{self.key.pk}x{self.count:03}"
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        body = {"model": "mine", "messages": messages, "temperature": 0, "stream": bool(self.count % 2)}
        given = {
            "request_id": name,
            "started_at": at,
            "key_id": self.key.pk,
            "prompt_tokens": 100,
            "max_tokens": 50,
            "cache_layer": "computed",
            "route": {"answer_cache": {"miss": "not_cached"}},
        }
        truncated = fields.pop("truncated", False)
        record(self.tenant, **given | self.fields | fields)
        settle(self.tenant, name, at=at, **(usage or {"uncached": 100, "output": 40}))
        if stores:
            with tenant_scope(self.tenant):
                RequestContent.objects.create(
                    tenant_id=self.tenant.pk,
                    request_id=name,
                    started_at=at,
                    body=json.dumps(body),
                    truncated=truncated,
                )
        return name

    def ask_daily(self, text: str = "Hello", days: Iterable[int] = DAYS, **fields: Any) -> str:
        """Record a request on each of the last days, soon after this time of the day. Return the newest."""
        self.ask(self.now - timedelta(days=7, minutes=30), f"{text}, an older one")  # so that all days are observed
        names = [self.ask(self.now - timedelta(days=day, minutes=-10), text, **fields) for day in days]
        return names[0]


def enable_warming(tenant: Tenant, budget_nano: int = NANO) -> Tenant:
    actions.do_update_settings(tenant, answer_cache_seconds=3600, cache_warming_nano=budget_nano)
    actions.do_update_settings(tenant, content_retention_days=30)
    return current(tenant)


def current(tenant: Tenant) -> Tenant:
    found: Tenant = unscoped(Tenant).get(pk=tenant.pk)
    return found


def make_prices() -> None:
    make_months()
    rate_card("alpha", **STANDARD)
    rate_card("alpha", tier="batch", **HALF)
