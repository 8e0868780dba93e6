"""The job that warms the caches of a tenant on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from billing.currencies.amounts import FEMTO_DIGITS, decimal
from millrace.apps.answer_caches.cache_warming import do_warm_caches
from tenants.jobs import JobResult, job_kind, json_result
from tenants.models import Tenant
from tenants.permissions import Permission


@job_kind("cache-warming.run", Permission.TENANT_UPDATE)
def warm_now(tenant: Tenant, _: Mapping[str, Any]) -> JobResult:
    """Warm the caches within the rest of the day's budget. Returns what the run has chosen."""
    run = do_warm_caches(tenant)
    return json_result(
        {
            "prompts": run.prompts,
            "prefixes": run.prefixes,
            "not_worthwhile": run.not_worthwhile,
            "over_budget": run.over_budget,
            "expected_usd": decimal(run.expected_femto, FEMTO_DIGITS, 2),
            "max_usd": decimal(run.max_femto, FEMTO_DIGITS, 2),
        }
    )
