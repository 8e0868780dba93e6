"""Cache warming: the most repeated prompts with their costs, the jobs of the last day, and the past runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from frontend.core.backend_messages import translate_message
from frontend.core.languages import lazy_text as _lazy
from frontend.core.numbers import Money, common_places, exact
from frontend.core.page_context import PageContext
from frontend.tenant.requests.messages import prompt_messages
from millrace.apps.answer_caches.cache_warming import (
    MAX_LISTED,
    ListedCandidate,
    check_opted_in,
    list_candidates,
    spent_femto,
)
from millrace.apps.answer_caches.models import WarmedPrompt
from millrace.apps.answer_caches.warming_jobs import jobs_of, run_parameters, search_prompts, warm_now
from millrace.apps.answer_caches.warming_settlement import permits_warming
from millrace.apps.answer_caches.warming_status import PastRun, past_runs
from millrace.apps.request_log.stored_prompts import decode_body, read_bodies
from tenants import actions
from tenants.jobs import do_start_job
from tenants.models import TenantJob
from tenants.permissions import Permission

HISTORY = timedelta(days=30)
EXCERPT_LENGTH = 160
# Why a run has left candidates out, by the names of its result.
LEFT_OUT: Mapping[str, str] = {
    "over_budget": _lazy("over the budget"),
    "cached": _lazy("in the cache already"),
    "without_key": _lazy("without a usable API key"),
    "unpriced": _lazy("without a price"),
    "not_worthwhile": _lazy("not worth their cost"),
    "unavailable": _lazy("no longer available"),
}
CACHES: Mapping[str, str] = {
    WarmedPrompt.Cache.ANSWER: _lazy("Answer"),
    WarmedPrompt.Cache.PREFIX: _lazy("Prefix"),
}


@dataclass(frozen=True)
class CandidateRow:
    """A candidate of the table. `name` is the beginning of its prompt, or the ID of a request with it."""

    listed: ListedCandidate
    name: str
    url: str
    cache: str
    standard: Money
    warmed: Money
    expected: Money


@dataclass(frozen=True)
class JobRow:
    """A job, and what it has found or why it failed."""

    job: TenantJob
    label: str
    text: str


@dataclass(frozen=True)
class RunRow:
    """A past run."""

    run: PastRun
    spent: Money
    saved: Money


def may_warm(ctx: PageContext) -> bool:
    """Return whether the user may warm the caches of a tenant that stores prompts and is served."""
    tenant = ctx.tenant
    return ctx.may(Permission.TENANT_UPDATE) and bool(tenant.content_retention_days) and not tenant.is_suspended


def budget(ctx: PageContext) -> dict[str, Any]:
    """Return the budget of a day, and what is spent of it."""
    return {
        "per_day": Money.nano(ctx.tenant.cache_warming_nano),
        "spent": Money(spent_femto(ctx.tenant, ctx.now)),
        "is_on": permits_warming(ctx.tenant),
    }


def candidates(ctx: PageContext) -> dict[str, Any]:
    """Return the most repeated prompts, and how many stored prompts were searched for them."""
    found = list_candidates(ctx.tenant, now=ctx.now)
    texts = _excerpts(ctx, found.rows)
    rows = [_candidate_row(ctx, listed, texts) for listed in found.rows]
    return {
        "rows": rows,
        "stored": found.stored,
        "undigested": found.undigested,
        "may_warm": may_warm(ctx),
        "standard_places": common_places(row.standard for row in rows),
        "warmed_places": common_places(row.warmed for row in rows),
        "expected_places": common_places(row.expected for row in rows),
    }


def _candidate_row(ctx: PageContext, listed: ListedCandidate, texts: Mapping[str, str]) -> CandidateRow:
    priced = listed.priced
    request_id = priced.candidate.newest.request_id
    return CandidateRow(
        listed,
        texts.get(listed.fingerprint) or request_id,
        ctx.url("requests-detail", request_id),
        CACHES[priced.candidate.cache],
        Money(priced.standard_femto),
        Money(priced.warmed_femto),
        Money(priced.expected_femto),
    )


def _excerpts(ctx: PageContext, rows: Sequence[ListedCandidate]) -> dict[str, str]:
    """Return the beginning of the last message of each prompt, and of the first one of each prefix, by fingerprint.

    The stored prompts are decoded one after another.
    """
    by_request: dict[str, list[ListedCandidate]] = defaultdict(list)
    for row in rows:
        by_request[row.priced.candidate.newest.request_id].append(row)
    found = {}
    for request_id, body in read_bodies(ctx.tenant.pk, list(by_request)):
        messages = prompt_messages(decode_body(body) or {})
        for row in by_request[request_id] if messages else ():
            is_prefix = row.priced.candidate.cache == WarmedPrompt.Cache.PREFIX
            text = messages[0 if is_prefix else -1].text
            found[row.fingerprint] = " ".join(text.split())[:EXCERPT_LENGTH]
    return found


def jobs(ctx: PageContext) -> dict[str, Any]:
    """Return the jobs of the last day."""
    return {"rows": [JobRow(job, _job_label(job), _job_text(job)) for job in jobs_of(ctx.tenant)]}


def _job_label(job: TenantJob) -> str:
    if job.kind == search_prompts.name:
        return _("Search of stored prompts")
    number = len(job.parameters.get("fingerprints", ()))
    if not number:
        return _("Warming of prompts that are worth their cost")
    return ngettext("Warming of %(number)s prompt", "Warming of %(number)s prompts", number) % {"number": number}


def _job_text(job: TenantJob) -> str:
    """Return what a job has found, or why it failed; empty while it runs."""
    if job.error:
        return translate_message(job.error)
    if job.status != TenantJob.Status.COMPLETED:
        return ""
    found = json.loads(job.result)
    if job.kind == search_prompts.name:
        return _("Prompts to search: %(number)s") % {"number": exact(found["undigested"])}
    left_out = [f"{label}: {exact(found[name])}" for name, label in LEFT_OUT.items() if found.get(name)]
    return " · ".join([_("Computed ahead: %(prompts)s") % {"prompts": exact(found["prompts"])}, *left_out])


def runs(ctx: PageContext) -> dict[str, Any]:
    """Return the newest runs of the last 30 days."""
    rows = [
        RunRow(run, Money(run.spent_femto), Money(run.saved_femto)) for run in past_runs(ctx.tenant, ctx.now - HISTORY)
    ]
    return {
        "rows": rows,
        "spent_places": common_places(row.spent for row in rows),
        "saved_places": common_places(row.saved for row in rows),
    }


def start_warming(ctx: PageContext, when: str, fingerprints: list[str], budget_nano: int) -> str:
    """Store the budget of a day, and start a run of the selected prompts if `when` is "now". Return the message.

    Raises:
        ActionRefused: the tenant stores no prompts or is suspended, or too many of its jobs are unfinished.
    """
    wanted = copy(ctx.tenant)
    wanted.cache_warming_nano = budget_nano
    if budget_nano:
        check_opted_in(wanted)
    with ctx.scope():  # without the job, the budget stays as it was
        if budget_nano != ctx.tenant.cache_warming_nano:
            actions.do_update_settings(ctx.tenant, cache_warming_nano=budget_nano)
        if when == "now":
            do_start_job(ctx.tenant, warm_now, run_parameters(fingerprints))
    if when == "now":
        return _("The selected prompts are being warmed. The job is listed below.")
    return _("Prompts are warmed every night.") if budget_nano else _("Cache warming is off.")


def selected_fingerprints(texts: list[str]) -> list[str]:
    """Return the texts that are fingerprints, at most as many as the page lists."""
    return [text for text in dict.fromkeys(texts) if _is_fingerprint(text)][:MAX_LISTED]


def _is_fingerprint(text: str) -> bool:
    return len(text) == 32 and set(text) <= set("0123456789abcdef")
