"""The jobs of cache warming that users start: one warms the caches of a tenant, one searches its stored prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from billing.currencies.amounts import FEMTO_DIGITS, decimal
from millrace.apps.answer_caches.cache_warming import do_warm_caches
from millrace.apps.answer_caches.warming_candidates import count_history, digest_history
from tenants.isolation.scopes import tenant_scope
from tenants.jobs import JobResult, job_kind, json_result
from tenants.models import Tenant, TenantJob
from tenants.permissions import Permission

MAX_JOBS = 20  # jobs that a page lists


@job_kind("cache-warming.run", Permission.TENANT_UPDATE)
def warm_now(tenant: Tenant, parameters: Mapping[str, Any]) -> JobResult:
    """Warm the caches within the rest of the day's budget. Returns what the run has chosen and left out."""
    chosen = parameters.get("fingerprints")
    run = do_warm_caches(tenant, only=None if chosen is None else {bytes.fromhex(text) for text in chosen})
    return json_result(
        {
            "prompts": run.prompts,
            "prefixes": run.prefixes,
            "not_worthwhile": run.not_worthwhile,
            "over_budget": run.over_budget,
            "cached": run.cached,
            "without_key": run.without_key,
            "unpriced": run.unpriced,
            "unavailable": run.unavailable,
            "expected_usd": decimal(run.expected_femto, FEMTO_DIGITS, 2),
            "max_usd": decimal(run.max_femto, FEMTO_DIGITS, 2),
        }
    )


def run_parameters(fingerprints: Iterable[str]) -> dict[str, list[str]]:
    """Return the parameters of a run of these candidates; of one that chooses its prompts if there are none."""
    chosen = sorted(set(fingerprints))
    return {"fingerprints": chosen} if chosen else {}


@job_kind("cache-warming.search", Permission.TENANT_UPDATE)
def search_prompts(tenant: Tenant, _: Mapping[str, Any]) -> JobResult:
    """Compute digests of stored prompts, of at most MAX_DIGESTED_BYTES. Returns how many prompts still have none."""
    now = datetime.now(UTC)
    digest_history(tenant.pk, now)
    with tenant_scope(tenant):
        count = count_history(tenant.pk, now)
    return json_result({"stored": count.stored, "undigested": count.undigested})


def jobs_of(tenant: Tenant) -> list[TenantJob]:
    """Return the latest jobs of cache warming, newest first. The tenant's scope must be open."""
    kinds = (warm_now.name, search_prompts.name)
    return list(TenantJob.objects.for_tenant(tenant).filter(kind__in=kinds).order_by("-pk")[:MAX_JOBS])
