"""`millrace prices`, `billing` and `health`: the commands of operators by hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from inference_worker.contract.command_line import format_command
from millrace.cli import output
from millrace.cli.app import FAILED, ResourceGroup, Session, api_command, command, given_options
from millrace.cli.output import Column, amount, cents, number, parse_amount, price_columns
from millrace.cli.plain_commands import columns_of
from millrace.cli.profiles import config_path, find_connection

_COMPARISON = [
    Column("tenant", "tenant_id", right=True),
    Column("model", "model"),
    Column("events", "events", number, right=True),
    Column("cost", "was_usd", amount, right=True),
    Column("would be", "would_be_usd", amount, right=True),
    Column("unpriced", "unpriced", number, right=True),
]


@click.group(cls=ResourceGroup)
def prices() -> None:
    """Manage price versions (operators)."""


@command(prices, "show", example="millrace prices show 4")
@click.argument("id", type=int)
def show_prices(session: Session, id: int) -> None:
    """Show the prices of a version."""
    version = session.client.operator.prices.get(id)
    if session.as_json:
        output.print_json(version)
        return
    output.print_fields(version, columns_of("prices", "list"))
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
    text = f"Drafted the version {version['id']}; {skipped} prices were left out (see --json)."
    if assumed := left_out["assumed"]:
        text += "\nAssumed, as the file has no such price:\n  " + "\n  ".join(map(output.printable, assumed))
    session.done(found, text)


@command(prices, "preview", example="millrace prices preview 4")
@click.argument("id", type=int)
def preview(session: Session, id: int) -> None:
    """Show what the usage of the last month would have cost at the draft's prices."""
    versions = session.client.operator.prices
    with output.tenant_currency(lambda: versions.get(id)["currency"]):
        session.rows(versions.preview(id), _COMPARISON, empty="No usage in this time.")


@click.group(cls=ResourceGroup, default="periods")
def billing() -> None:
    """Close billing periods and manage invoices (operators)."""


@command(billing, "finalize", example="millrace billing finalize 40")
@click.argument("invoice", type=int)
def finalize(session: Session, invoice: int) -> None:
    """Finalize a draft: it gets its number and is sent."""
    made = session.client.operator.invoices.finalize(invoice)
    session.done(made, f"Finalized the invoice {made['number']}: {cents(made['total'], made['currency'])}.")


@command(billing, "set-chart", example="millrace billing set-chart 1 accounts.csv --consultant 1001 --client 7")
@click.argument("entity", type=int)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--consultant", type=int, required=True, metavar="N", help="DATEV's consultant number.")
@click.option("--client", type=int, required=True, metavar="N", help="DATEV's client number.")
@click.option("--first-month", type=int, metavar="MONTH", help="First month of the fiscal year; default: 1.")
@click.option("--account-digits", type=int, metavar="N", help="Digits of general ledger accounts; default: 4.")
def set_chart(session: Session, entity: int, file: Path, **fields: Any) -> None:
    """Replace the chart of accounts of a billing entity by a CSV file. If a line is not valid, nothing is stored.

    Columns: account, tax_category, tax_rate, number, tax_key, with_tax.
    """
    try:
        content = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as exc:
        raise click.UsageError(f"{file} is not UTF-8. Save it as CSV in UTF-8.") from exc
    entities = session.client.operator.entities
    chart = entities.set_chart(entity, file_name=file.name, content=content, **given_options(fields))
    session.done(chart, f"Stored {len(chart['lines'])} account numbers from {chart['file_name']}.")


@command(billing, "import-payments", example="millrace billing import-payments statement.xml")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def import_payments(session: Session, file: Path) -> None:
    """Record the payments of a CSV file, or of bank statements in the format camt.053.

    A file with an error books nothing. What was recorded before is skipped, so a file may be repeated.
    """
    try:
        content = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as exc:
        raise click.UsageError(f"{file} is not UTF-8. Save it in UTF-8.") from exc
    found = session.client.operator.payments.import_file(file_name=file.name, content=content)
    text = f"Recorded {found['booked']} payments from {file.name}; {found['known']} were known."
    if found["open"]:
        listing = format_command("billing bank-entries --state open")
        text += f"\n{found['open']} name no known invoice. List them with `{listing}`, and assign them."
    if found["known_statements"]:
        text += f"\n{found['known_statements']} bank statements were imported before."
    session.done(found, text)


@command(billing, "set-exchange-rate", example="millrace billing set-exchange-rate EUR 0.92 --from 2026-11-01")
@click.argument("currency")
@click.argument("rate", metavar="PER_USD")
@click.option("--from", "day", required=True, metavar="DAY", help="First day, such as 2026-11-01.")
def set_exchange_rate(session: Session, currency: str, rate: str, day: str) -> None:
    """Set the price of one USD in a currency, from a day on."""
    micro = parse_amount(rate, "the rate", 10**6, "PER_USD")
    made = session.client.operator.exchange_rates.create(currency=currency.upper(), on=day, micro_per_usd=micro)
    session.done(made, f"Set the exchange rate of {made['currency']} from {made['on']}.")


@command(
    billing,
    "import-exchange-rates",
    example="millrace billing import-exchange-rates eurofxref-hist.csv --since 2026-01-01",
)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--since", metavar="DAY", help="First day, such as 2026-01-01; default: all of the file.")
def import_exchange_rates(session: Session, file: Path, **fields: Any) -> None:
    """Import a CSV or XML file of exchange rates of the European Central Bank."""
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as exc:
        raise click.UsageError(f"{file} is not a text. Extract the CSV of an archive first.") from exc
    found = session.client.operator.exchange_rates.import_file(content=content, **given_options(fields))
    text = f"Imported {found['new']} exchange rates until {found['newest_on']}; {found['known']} were known."
    session.done(found, text)


def _readiness(session: Session) -> None:
    """Check whether the platform can serve requests. Exits with status 1 if it cannot."""
    import httpx2

    from millrace.client import ConnectionFailed

    url = find_connection(session.profile, os.environ, config_path()).url
    try:
        found = httpx2.get(f"{url}/readyz", params={"models": "all"}, timeout=30).json()
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
