"""`millrace tenants`, `prices`, `billing`, `fleet` and `health`: the commands of operators."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from millrace.cli import output
from millrace.cli.app import FAILED, ResourceGroup, Session, api_command, command, given_options
from millrace.cli.output import Column, cents, moment, number, usd, yes_no
from millrace.cli.profiles import config_path, find_connection

_TENANT = [
    Column("id", "id", right=True),
    Column("slug", "slug"),
    Column("name", "name"),
    Column("status", "status"),
    Column("created", "created_at", moment),
    Column("purged after", "purge_after", moment),
]
_VERSION = [
    Column("id", "id", right=True),
    Column("book", "book"),
    Column("tenant", "tenant_id", right=True),
    Column("number", "number", right=True),
    Column("state", "state"),
    Column("effective from", "effective_from", moment),
    Column("note", "note"),
    Column("author", "created_by"),
]
_PRICE = [
    Column("model", "model"),
    Column("tier", "tier"),
    Column("component", "component"),
    Column("USD per million", "usd_per_million", right=True),
    Column("from tokens", "from_tokens", number, right=True),
    Column("from", "from_time"),
    Column("until", "until_time"),
]
_COMPARISON = [
    Column("tenant", "tenant_id", right=True),
    Column("model", "model"),
    Column("events", "events", number, right=True),
    Column("cost", "was_usd", usd, right=True),
    Column("would be", "would_be_usd", usd, right=True),
    Column("unpriced", "unpriced", number, right=True),
]
_PERIOD = [
    Column("id", "id", right=True),
    Column("entity", "entity"),
    Column("month", "label"),
    Column("ends", "ends_at", moment),
    Column("closed", "closed_at", moment),
    Column("invoiced", "invoiced_at", moment),
]
_DRAFT = [Column("id", "id", right=True), Column("number", "number"), Column("state", "state")]
_DRAFT += [Column("month", "month"), Column("total", "total", cents, right=True)]
_WORKER = [
    Column("id", "id"),
    Column("model", "model"),
    Column("state", "state"),
    Column("running", "running", number, right=True),
    Column("waiting", "waiting", number, right=True),
    Column("free KV blocks", lambda row: f"{row['free_blocks']:,} of {row['total_blocks']:,}", right=True),
]
_MODEL = [Column("name", "name"), Column("source", "origin"), Column("ready replicas", "workers", right=True)]


@click.group(cls=ResourceGroup)
def tenants() -> None:
    """Manage tenants (operators)."""


@command(tenants, "list", example="millrace tenants list --search acme", rows=True)
@click.option("--search", metavar="TEXT", help="Part of the name.")
@click.option("--status", type=click.Choice(["active", "suspended", "purged"]), help="Only tenants with this status.")
def list_tenants(session: Session, limit: int, **filters: Any) -> None:
    """List the tenants, newest first."""
    session.rows(session.client.operator.tenants.list(**given_options(filters)), _TENANT, limit=limit)


@command(tenants, "create", example="millrace tenants create acme --name Acme --owner owner@acme.example")
@click.argument("slug")
@click.option("--name", help="Name; default: the slug.")
@click.option("--owner", "owner_email", metavar="EMAIL", help="Email address that is invited as owner.")
def create_tenant(session: Session, slug: str, name: str | None, **fields: Any) -> None:
    """Create a tenant, and invite its owner."""
    tenant = session.client.operator.tenants.create(slug=slug, name=name or slug, **given_options(fields))
    session.done(tenant, f"Created the tenant {tenant['id']} ({slug}).")


def _tenant_action(name: str, text: str, done: str) -> None:
    @command(tenants, name, example=f"millrace tenants {name} 3")
    @click.argument("id", type=int)
    def run(session: Session, id: int) -> None:
        tenant = getattr(session.client.operator.tenants, name)(id)
        session.done(tenant, f"{done} the tenant {tenant['slug']}.")

    tenants.commands[name].help = text


_tenant_action("suspend", "Suspend a tenant: its requests are rejected.", "Suspended")
_tenant_action("resume", "Resume a suspended tenant.", "Resumed")
_tenant_action("delete", "Delete a tenant. It can be restored until its data is purged.", "Deleted")
_tenant_action("restore", "Restore a deleted tenant.", "Restored")


@click.group(cls=ResourceGroup)
def prices() -> None:
    """Manage price versions (operators)."""


@command(prices, "list", example="millrace prices list --state draft", rows=True)
@click.option("--state", type=click.Choice(["draft", "published", "discarded"]), help="Only versions in this state.")
@click.option("--book", metavar="NAME", help="Only this price book.")
@click.option("--tenant", "tenant_id", type=int, metavar="ID", help="Only this tenant's own prices.")
def list_prices(session: Session, limit: int, **filters: Any) -> None:
    """List price versions, newest first."""
    session.rows(session.client.operator.prices.list(**given_options(filters)), _VERSION, limit=limit)


@command(prices, "show", example="millrace prices show 4")
@click.argument("id", type=int)
def show_prices(session: Session, id: int) -> None:
    """Show the prices of a version."""
    version = session.client.operator.prices.get(id)
    if session.as_json:
        output.print_json(version)
        return
    output.print_fields(version, _VERSION)
    click.echo()
    output.print_table(version["prices"], _PRICE, "No prices.")


@command(prices, "import", example="millrace prices import prices.csv --note 'March prices'")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--book", metavar="NAME", help="Price book; default: list.")
@click.option("--tenant", "tenant_id", type=int, metavar="ID", help="Own prices of this tenant.")
@click.option("--model", "models", multiple=True, metavar="MODEL", help="Only this model of a public file; repeat.")
@click.option("--effective-from", metavar="TIME", help="Default: the time of publication.")
@click.option(
    "--round", is_flag=True, default=None, help="Round prices that are not whole nano-USD per million tokens."
)
@click.option("--note", help="What the version is for.")
def import_prices(session: Session, file: Path, **fields: Any) -> None:
    """Draft the prices of a CSV or of the public JSON price file."""
    kind: Any = "csv" if file.suffix == ".csv" else "json"
    content = file.read_text(encoding="utf-8")
    found = session.client.operator.prices.import_file(file_type=kind, content=content, **given_options(fields))
    version, left_out = found["version"], found["left_out"]
    skipped = len(left_out["not_whole"]) + len(left_out["refused"]) + len(left_out["unpriced"])
    session.done(found, f"Drafted the version {version['id']}; {skipped} prices were left out (see --json).")


@command(prices, "preview", example="millrace prices preview 4")
@click.argument("id", type=int)
def preview(session: Session, id: int) -> None:
    """Show what the usage of the last month would have cost at the draft's prices."""
    session.rows(session.client.operator.prices.preview(id), _COMPARISON, empty="No usage in this time.")


@command(prices, "publish", example="millrace prices publish 4")
@click.argument("id", type=int)
def publish(session: Session, id: int) -> None:
    """Publish a draft. Another operator than its author must do this."""
    session.done(session.client.operator.prices.publish(id), f"Published the version {id}.")


@command(prices, "discard", example="millrace prices discard 4")
@click.argument("id", type=int)
def discard(session: Session, id: int) -> None:
    """Discard a draft."""
    session.done(session.client.operator.prices.discard(id), f"Discarded the version {id}.")


@click.group(cls=ResourceGroup, default="periods")
def billing() -> None:
    """Close billing periods and manage invoices (operators)."""


@command(billing, "periods", example="millrace billing periods", rows=True)
def list_periods(session: Session, limit: int) -> None:
    """List the billing periods of every entity."""
    session.rows(session.client.operator.periods.list(), _PERIOD, limit=limit)


@command(billing, "close", example="millrace billing close 12")
@click.argument("id", type=int)
def close(session: Session, id: int) -> None:
    """Close a billing period that is over."""
    session.done(session.client.operator.periods.close(id), f"Closed the billing period {id}.")


@command(billing, "draft", example="millrace billing draft 3 --month 2026-10")
@click.argument("tenant", type=int)
@click.option("--month", required=True, metavar="MONTH", help="Month, such as 2026-10.")
def draft(session: Session, tenant: int, month: str) -> None:
    """Draft a tenant's invoices of a month again."""
    session.rows(session.client.operator.tenants.draft_invoices(tenant, month=month), _DRAFT, empty="No drafts.")


@command(billing, "finalize", example="millrace billing finalize 40")
@click.argument("invoice", type=int)
def finalize(session: Session, invoice: int) -> None:
    """Finalize a draft: it gets its number and is sent."""
    made = session.client.operator.invoices.finalize(invoice)
    session.done(made, f"Finalized the invoice {made['number']}: {cents(made['total'])}.")


@command(billing, "void", example='millrace billing void 40 --reason "Wrong address"')
@click.argument("invoice", type=int)
@click.option("--reason", required=True, help="Why; it is stored with the invoice.")
def void(session: Session, invoice: int, reason: str) -> None:
    """Void an invoice."""
    session.done(session.client.operator.invoices.void(invoice, reason=reason), f"Voided the invoice {invoice}.")


@command(billing, "write-off", example='millrace billing write-off 40 --reason "Insolvent"')
@click.argument("invoice", type=int)
@click.option("--reason", required=True, help="Why; it is stored with the invoice.")
def write_off(session: Session, invoice: int, reason: str) -> None:
    """Write off an invoice as uncollectible."""
    made = session.client.operator.invoices.write_off(invoice, reason=reason)
    session.done(made, f"Wrote off the invoice {invoice}.")


@command(billing, "reconciliation", example="millrace billing reconciliation")
def reconciliation(session: Session) -> None:
    """Show the newest comparison of budgets, leases, events and journals."""
    session.one(session.client.operator.reconciliation.get(), _RECONCILIATION)


_RECONCILIATION = [
    Column("clean", "is_clean", yes_no),
    Column("late", lambda row: "yes, none for a quarter of an hour" if row["is_late"] else "not late"),
    Column("compared", lambda row: row["report"] and row["report"]["created_at"], moment),
    Column("budget periods", lambda row: row["report"] and row["report"]["budget_periods"], number),
    Column("corrected", lambda row: row["report"] and row["report"]["corrected"], number),
    Column("in quarantine", lambda row: sum(row["quarantine"].values()), number),
]


@click.group(cls=ResourceGroup, default="workers")
def fleet() -> None:
    """Show workers and models (operators)."""


@command(fleet, "workers", example="millrace fleet workers")
def workers(session: Session) -> None:
    """List the replicas with their last heartbeats."""
    session.rows(session.client.operator.workers.list(), _WORKER, empty="No replicas.")


@command(fleet, "models", example="millrace fleet models")
def models(session: Session) -> None:
    """List the deployments."""
    session.rows(session.client.operator.models.list(), _MODEL, empty="No models.")


def _readiness(session: Session) -> None:
    """Check whether the platform can serve requests. Exits with status 1 if it cannot."""
    import httpx

    from millrace.client import ConnectionFailed

    url = find_connection(session.profile, os.environ, config_path()).url
    try:
        found = httpx.get(f"{url}/readyz", timeout=30).json()
        rows = [{"name": name, "state": state} for name, state in found["checks"].items()]
        rows += [{"name": name, "state": state} for name, state in found["down"].items()]
    except (httpx.HTTPError, ValueError, KeyError, AttributeError) as exc:
        raise ConnectionFailed(f"{url}/readyz does not respond: {exc}") from exc
    if session.as_json:
        output.print_json(found)
    else:
        click.echo(f"{url}: {output.printable(str(found['status']))}")
        output.print_table(rows, [Column("check", "name"), Column("state", "state")], "No checks.")
    if found["status"] != "ready":
        raise SystemExit(FAILED)


health = api_command("health", _readiness, example="millrace health")
