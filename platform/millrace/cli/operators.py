"""`millrace prices`, `billing`, `fleet` and `health`: the commands of operators."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from millrace.cli import output
from millrace.cli.app import FAILED, ResourceGroup, Session, api_command, command, given_options
from millrace.cli.output import Column, amount, amount_of, cents, moment, number, parse_amount, price_columns, yes_no
from millrace.cli.profiles import config_path, find_connection

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
_COMPARISON = [
    Column("tenant", "tenant_id", right=True),
    Column("model", "model"),
    Column("events", "events", number, right=True),
    Column("cost", "was_usd", amount, right=True),
    Column("would be", "would_be_usd", amount, right=True),
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
_DRAFT += [Column("month", "month"), Column("total", amount_of("total"), right=True)]
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
    columns = price_columns(lambda text: output.money(text, version["currency"]))
    output.print_table(version["prices"], columns, "No prices.")


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
    versions = session.client.operator.prices
    with output.tenant_currency(lambda: versions.get(id)["currency"]):
        session.rows(versions.preview(id), _COMPARISON, empty="No usage in this time.")


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
    session.done(made, f"Finalized the invoice {made['number']}: {cents(made['total'], made['currency'])}.")


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


_ENTITY = [
    Column("id", "id", right=True),
    Column("slug", "slug"),
    Column("name", "name"),
    Column("country", "country"),
    Column("VAT ID", "vat_id"),
    Column("invoice prefix", "invoice_prefix"),
    Column("terms", "terms_days", lambda days: f"{days} days", right=True),
]
_TAX_RULE = [
    Column("id", "id", right=True),
    Column("entity", "entity"),
    Column("country", "country"),
    Column("region", "region"),
    Column("buyer", "buyer"),
    Column("category", "category"),
    Column("rate", "rate_ppm", lambda ppm: f"{ppm / 10_000:g}%", right=True),
    Column("from", "starts_on"),
    Column("until", "ends_on"),
]
_EXCHANGE_RATE = [
    Column("currency", "currency"),
    Column("from", "on"),
    Column("per USD", "micro_per_usd", lambda micro: f"{micro // 10**6}.{micro % 10**6:06}", right=True),
]


@command(billing, "entities", example="millrace billing entities", rows=True)
def list_entities(session: Session, limit: int) -> None:
    """List the billing entities, which issue invoices."""
    session.rows(session.client.operator.entities.list(), _ENTITY, limit=limit)


@command(billing, "tax-rules", example="millrace billing tax-rules", rows=True)
def list_tax_rules(session: Session, limit: int) -> None:
    """List the tax rules."""
    session.rows(session.client.operator.tax_rules.list(), _TAX_RULE, limit=limit, empty="No tax rules.")


@command(billing, "exchange-rates", example="millrace billing exchange-rates", rows=True)
def list_exchange_rates(session: Session, limit: int) -> None:
    """List the exchange rates, which are only for display."""
    rows = session.client.operator.exchange_rates.list()
    session.rows(rows, _EXCHANGE_RATE, limit=limit, empty="No exchange rates.")


@command(billing, "set-exchange-rate", example="millrace billing set-exchange-rate EUR 0.92 --from 2026-11-01")
@click.argument("currency")
@click.argument("rate", metavar="PER_USD")
@click.option("--from", "day", required=True, metavar="DAY", help="First day, such as 2026-11-01.")
def set_exchange_rate(session: Session, currency: str, rate: str, day: str) -> None:
    """Set the price of one USD in a currency, from a day on."""
    micro = parse_amount(rate, "the rate", 10**6, "PER_USD")
    made = session.client.operator.exchange_rates.create(currency=currency.upper(), on=day, micro_per_usd=micro)
    session.done(made, f"Set the exchange rate of {made['currency']} from {made['on']}.")


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
    import httpx2

    from millrace.client import ConnectionFailed

    url = find_connection(session.profile, os.environ, config_path()).url
    try:
        found = httpx2.get(f"{url}/readyz", timeout=30).json()
        rows = [{"name": name, "state": state} for name, state in found["checks"].items()]
        rows += [{"name": name, "state": state} for name, state in found["down"].items()]
    except (httpx2.HTTPError, ValueError, KeyError, AttributeError) as exc:
        raise ConnectionFailed(f"{url}/readyz does not respond: {exc}") from exc
    if session.as_json:
        output.print_json(found)
    else:
        click.echo(f"{url}: {output.printable(str(found['status']))}")
        output.print_table(rows, [Column("check", "name"), Column("state", "state")], "No checks.")
    if found["status"] != "ready":
        raise SystemExit(FAILED)


health = api_command("health", _readiness, example="millrace health")
