"""Tenants whose caches are warmed."""

from __future__ import annotations

from tenants import actions
from tenants.models import Tenant
from tests.support.billing.books import make_months, rate_card
from tests.support.rows import unscoped

HITS = {"answer_hit_input": "0.30", "answer_hit_output": "1.50"}
STANDARD = {"uncached": "3", "cache_read": "0.30", "output": "15", **HITS}
HALF = {"uncached": "1.50", "cache_read": "0.15", "output": "7.50"}
NANO = 10**9


def enable_warming(tenant: Tenant, budget_nano: int = NANO) -> Tenant:
    actions.do_set_answer_cache(tenant, seconds=3600, warming_nano=budget_nano)
    actions.do_set_content_retention(tenant, 30)
    return current(tenant)


def current(tenant: Tenant) -> Tenant:
    found: Tenant = unscoped(Tenant).get(pk=tenant.pk)
    return found


def make_prices() -> None:
    make_months()
    rate_card("alpha", **STANDARD)
    rate_card("alpha", tier="batch", **HALF)
