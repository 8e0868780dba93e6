"""`millrace cache`: cache warming of a tenant."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from millrace.cli import output
from millrace.cli.app import ResourceGroup, Session, command, given_options
from millrace.cli.job_results import wait_for_result
from millrace.cli.output import Column, amount, moment, nano_amount, number
from millrace.cli.plain_commands import instant

if TYPE_CHECKING:
    from millrace.client import Client

_STATUS = [
    Column("budget per day", "budget_nano", nano_amount),
    Column("spent today", "spent_today_usd", amount),
    Column("prompts", "prompts", number),
    Column("computed", "computed", number),
    Column("used", "used", number),
    Column("hits", "hits", number),
    Column("spent", "spent_usd", amount),
    Column("saved", "saved_usd", amount),
]
_PROMPT = [
    Column("request", lambda row: row["request_id"] or row["source_request_id"]),
    Column("cache", "cache"),
    Column("model", "model"),
    Column("created", "created_at", moment),
    Column("expires", "expires_at", moment),
    Column("cost", "cost_usd", amount, right=True),
    Column("hits", "hits", number, right=True),
    Column("saved", "saved_usd", amount, right=True),
]
_CANDIDATE = [
    Column("candidate", "fingerprint"),
    Column("request", "source_request_id"),
    Column("cache", "cache"),
    Column("model", "model"),
    Column("requests", "requests", number, right=True),
    Column("cost now", "standard_usd", amount, right=True),
    Column("cost warmed", "warmed_usd", amount, right=True),
    Column("expected saving", "expected_usd", amount, right=True),
    Column("cached", lambda row: "yes" if row["is_cached"] else "no"),
]
_RUN = [
    Column("prompts", "prompts", number),
    Column("for the prefix cache", "prefixes", number),
    Column("not worth their cost", "not_worthwhile", number),
    Column("over the budget", "over_budget", number),
    Column("in the cache already", "cached", number),
    Column("without a usable key", "without_key", number),
    Column("without a price", "unpriced", number),
    Column("no longer available", "unavailable", number),
    Column("expected saving", "expected_usd", amount),
    Column("maximum cost", "max_usd", amount),
]


@click.group(cls=ResourceGroup, default="warming")
def cache() -> None:
    """Warm the caches, and show what that saved."""


def _client(session: Session, tenant: str | None) -> Client:
    return session.tenant_client(tenant) if tenant else session.client


@command(cache, "candidates", example="millrace cache candidates")
@click.option("--tenant", metavar="SLUG", help="Tenant, for operators.")
def candidates(session: Session, tenant: str | None) -> None:
    """Show the most repeated prompts and prefixes, with the cost of their next requests."""
    client = _client(session, tenant)
    found = client.cache_warming.candidates()
    if session.as_json:
        output.print_json(found)
        return
    with output.tenant_currency(lambda: client.billing_currency.get()["currency"]):
        output.print_table(found["results"], _CANDIDATE, "No stored prompts are repeated.")


@command(cache, "warm", example="millrace cache warm")
@click.option("--tenant", metavar="SLUG", help="Tenant whose caches are warmed, for operators.")
@click.option(
    "--candidate", "fingerprints", metavar="ID", multiple=True, help="Only this candidate; repeat for several."
)
def warm(session: Session, tenant: str | None, fingerprints: tuple[str, ...]) -> None:
    """Compute frequent prompts and shared prefixes now, in the batch class, within the day's budget."""
    client = _client(session, tenant)
    chosen = given_options({"fingerprints": fingerprints})
    with output.tenant_currency(lambda: client.billing_currency.get()["currency"]):
        session.one(wait_for_result(client, client.cache_warming.run(**chosen)), _RUN)


@command(cache, "warming", example="millrace cache warming --from 2026-11-01")
@click.option("--tenant", metavar="SLUG", help="Tenant, for operators.")
@click.option("--from", "from_", metavar="TIME", help="First instant; default: a day ago.")
@click.option("--to", metavar="TIME", help="First instant that does not count; default: now.")
def warming(session: Session, tenant: str | None, **filters: Any) -> None:
    """Show the warmed prompts, and what they cost and saved."""
    filters |= {name: instant(filters[name]) for name in ("from_", "to")}
    client = _client(session, tenant)
    found = client.cache_warming.get(**given_options(filters))
    if session.as_json:
        output.print_json(found)
        return
    with output.tenant_currency(lambda: client.billing_currency.get()["currency"]):
        output.print_fields(found, _STATUS)
        if found["results"]:
            click.echo()
        output.print_table(found["results"], _PROMPT, "No prompts were warmed in this time.")
