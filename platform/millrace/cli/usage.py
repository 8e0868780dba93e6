"""`millrace usage`, `requests` and `invoices`: the usage of a tenant, and its cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from inference_worker.contract.command_line import format_command
from millrace.cli import output
from millrace.cli.app import ResourceGroup, Session, command, given_options
from millrace.cli.output import (
    DEFAULT_CURRENCY,
    Column,
    amount,
    cents,
    moment,
    number,
)
from millrace.cli.plain_commands import columns_of, instant

_ENDINGS = {"cii": "-cii.xml", "ubl": "-ubl.xml"}  # ends of file names by format
GROUPS = click.Choice(["model", "key", "project", "tier", "miss_reason", "end_user"])
_GROUP_FIELDS = {"key": "key_id", "project": "project_id", "miss_reason": "miss_reason"}
_COUNTS = [
    Column("requests", lambda row: sum(row["requests"].values()), number, right=True),
    Column("input tokens", "tokens.input", number, right=True),
    Column("cached", "tokens.cache_read", number, right=True),
    Column("output tokens", "tokens.output", number, right=True),
    Column("cost", "cost.usd", amount, right=True),
    Column("saved", "cost.saved_usd", amount, right=True),
]
SUCCESS_GROUPS = click.Choice(["model", "policy", "cache_layer", "key", "end_user"])
_SUCCESS = [
    Column("group", "name", lambda name: name or "none"),
    Column("requests", "requests", number, right=True),
    Column("successful", "succeeded", number, right=True),
    Column("bad feedback", "bad_feedback", number, right=True),
    Column("schema", "schema_failures", number, right=True),
    Column("tool call", "tool_failures", number, right=True),
    Column("sent again", "retried", number, right=True),
    Column("aborted", "cancelled", number, right=True),
    Column("error", "errors", number, right=True),
    Column("cost", "usd", amount, right=True),
    Column("per success", "usd_per_success", lambda cost: amount(cost) if cost else "none", right=True),
]
_RATES = [
    Column("start", "start", moment),
    *(
        Column(name, name, number, right=True)
        for name in ("requests", "completed", "cancelled", "failed", "limited", "refused")
    ),
    Column("p95 first token", "ttft_p95_ms", output.milliseconds, right=True),
]


@click.group(cls=ResourceGroup, default="summary")
def usage() -> None:
    """Show what was used and what it cost."""


@command(usage, "summary", example="millrace usage --by model --by key --from 2026-11-01 --bucket day")
@click.option("--by", "groups", multiple=True, type=GROUPS, help="Group by this; repeat for several; default: model.")
@click.option("--bucket", type=click.Choice(["hour", "day", "month"]), help="A row for each hour, day or month.")
@click.option("--from", "from_", metavar="TIME", help="First instant, such as 2026-11-01; default: this month.")
@click.option("--to", metavar="TIME", help="First instant that does not count; default: now.")
@click.option("--tz", metavar="ZONE", help="Time zone of the times and buckets, such as Europe/Paris; default: UTC.")
@click.option("--model", metavar="MODEL", help="Only this model.")
@click.option("--key", type=int, metavar="ID", help="Only this API key.")
@click.option("--project", type=int, metavar="ID", help="Only this project.")
@click.option("--end-user", metavar="USER", help="Only this end user.")
def summary(session: Session, groups: tuple[str, ...], **filters: Any) -> None:
    """Show sums of requests, tokens and cost."""
    filters |= {name: instant(filters[name]) for name in ("from_", "to")}
    groups = groups or ("model",)
    found = session.client.usage.get(group_by=",".join(groups), **given_options(filters))
    if session.as_json:
        output.print_json(found)
        return
    columns = [Column("start", "start", moment)] if found["bucket"] else []
    columns += [Column(group, _GROUP_FIELDS.get(group, group)) for group in groups]
    rows: list[Any] = list(found["rows"])
    if rows:
        rows.append({columns[0].value: None, **found["total"]})
    output.print_table(rows, [*columns, *_COUNTS], "No usage in this time.")
    if rows:
        click.echo("The last row is the total.", err=True)


@click.group(cls=ResourceGroup)
def requests() -> None:
    """Look into the request log."""


@command(requests, "show", example="millrace requests show req_0123456789")
@click.argument("id")
def show_request(session: Session, id: str) -> None:
    """Show all that is known of a request: its record, executions, budgets and costs."""
    story = session.client.requests.get(id)
    if session.as_json:
        output.print_json(story)
        return
    record = story["record"]
    if record is not None:
        output.print_fields({**record, "usage": {"usd": story["usd"]}}, columns_of("requests", "list"))
    for execution in story["executions"]:
        title = f"execution {execution['execution']}: {execution['outcome']} on {execution['replica']}"
        click.echo(f"\n{output.printable(title)}")
        lines = [Column("component", "component"), Column("tokens", "tokens", number, right=True)]
        lines += [
            Column("per million", "usd_per_million", amount, right=True),
            Column("cost", "usd", amount, right=True),
        ]
        output.print_table(execution["lines"], lines, "Nothing was billed.")
    columns = [Column("budget", "name"), Column("unit", "unit"), Column("period", "period"), Column("mode", "mode")]
    if story["budgets"]:
        click.echo("\nbudgets")
        output.print_table(story["budgets"], columns, "")


@command(requests, "rates", example="millrace requests rates --bucket hour")
@click.option("--bucket", type=click.Choice(["hour", "day"]), help="A row for each hour or day; default: hour.")
@click.option("--from", "from_", metavar="TIME", help="First instant; default: a day ago.")
@click.option("--to", metavar="TIME", help="First instant that does not count; default: now.")
def rates(session: Session, **filters: Any) -> None:
    """Show the number of requests by outcome."""
    filters |= {name: instant(filters[name]) for name in ("from_", "to")}
    found = session.client.requests.rates(**given_options(filters))
    if session.as_json:
        output.print_json(found)
    else:
        output.print_table(found["buckets"], _RATES, "No requests in this time.")


@command(requests, "success", example="millrace requests success --by policy --from 2026-11-01")
@click.option("--by", "group_by", type=SUCCESS_GROUPS, help="A row for each; default: model.")
@click.option("--model", metavar="MODEL", help="Only requests that this model served.")
@click.option("--key", type=int, metavar="ID", help="Only this API key.")
@click.option("--from", "from_", metavar="TIME", help="First instant; default: a day ago.")
@click.option("--to", metavar="TIME", help="First instant that does not count; default: now.")
def success(session: Session, **filters: Any) -> None:
    """Show successful requests and the cost of one, which includes failed attempts."""
    filters |= {name: instant(filters[name]) for name in ("from_", "to")}
    found = session.client.requests.success(**given_options(filters))
    if session.as_json:
        output.print_json(found)
    else:
        output.print_table(found["groups"], _SUCCESS, "No requests in this time.")


@click.group(cls=ResourceGroup)
def invoices() -> None:
    """Show and download invoices."""


@command(invoices, "show", example="millrace invoices show 7 --json")
@click.argument("id", type=int)
def show_invoice(session: Session, id: int) -> None:
    """Show an invoice; with --json the whole document."""
    invoice = session.client.invoices.get(id)
    if session.as_json:
        output.print_json(invoice)
        return
    document = invoice["document"]
    lines = [line for line in document.get("lines", ()) if isinstance(line, dict)]
    currency = str(document.get("currency", DEFAULT_CURRENCY))
    owed = Column("outstanding", lambda row: cents(row["outstanding"], currency))
    columns = [Column("id", "id"), Column("state", "state"), owed]
    output.print_fields(invoice, [*columns, Column("lines", lambda _: len(lines)), Column("SHA-256", "sha256")])
    download = format_command(f"invoices download {id}")
    click.echo(f"The document is printed by --json, and saved by `{download}`.", err=True)


@command(invoices, "download", example="millrace invoices download 7 --format pdf --output invoice.pdf")
@click.argument("id", type=int)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["pdf", "html", "csv", "cii", "ubl"]),
    default="pdf",
    help="cii and ubl are the XML of an e-invoice. Default: pdf.",
)
@click.option(
    "--output", "path", type=click.Path(path_type=Path), metavar="FILE", help="Default: invoice-<id>.<format>."
)
def download(session: Session, id: int, kind: str, path: Path | None) -> None:
    """Save an invoice as a file. PDFs have the CII XML (Factur-X) attached."""
    invoices = session.client.invoices
    if kind == "pdf":
        content = invoices.pdf(id)
    elif kind in ("cii", "ubl"):
        content = invoices.xml(id) if kind == "cii" else invoices.xml(id, syntax="ubl")
    else:
        content = (invoices.html(id) if kind == "html" else invoices.csv(id)).encode()
    path = path or Path(f"invoice-{id}{_ENDINGS.get(kind, f'.{kind}')}")
    _save(session, path, content)


def _save(session: Session, path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as exc:
        raise click.ClickException(f"{path}: {exc.strerror}. Choose another file with --output.") from exc
    session.done({"file": str(path), "bytes": len(content)}, f"Saved {path}.")


_STATEMENT = [
    Column("date", "date"),
    Column("type", "line_type", lambda name: name.replace("_", " ")),
    Column("number", "number"),
    Column("details", "details"),
    Column("amount", "amount", right=True),
    Column("balance", "balance", right=True),
]


@command(invoices, "statement", example="millrace invoices statement --from 2026-10-01 --format pdf")
@click.option("--from", "from_", metavar="DAY", help="First day; default: the first one of the last day's year.")
@click.option("--to", metavar="DAY", help="Last day; default: today.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["table", "csv", "pdf"]),
    default="table",
    help="csv and pdf save a file. Default: table.",
)
@click.option("--tenant", type=int, metavar="ID", help="Of this tenant (operators).")
@click.option("--output", "path", type=click.Path(path_type=Path), metavar="FILE", help="Default: statement.<format>.")
def statement(session: Session, kind: str, tenant: int | None, path: Path | None, **days: str | None) -> None:
    """Show the statement of account: balances, documents and payments. Amounts that are owed are positive."""
    given: dict[str, Any] = given_options(days)
    client = session.client
    if kind != "table":
        own, all_of = client.billing, client.operator.tenants
        if kind == "csv":
            text = own.statement_csv(**given) if tenant is None else all_of.statement_csv(tenant, **given)
            content = text.encode()
        else:
            content = own.statement_pdf(**given) if tenant is None else all_of.statement_pdf(tenant, **given)
        _save(session, path or Path(f"statement.{kind}"), content)
        return
    found = client.billing.statement(**given) if tenant is None else client.operator.tenants.statement(tenant, **given)
    if session.as_json:
        output.print_json(found)
        return
    currency = found["currency"]
    ends = {"number": "", "details": "", "amount": None}
    rows: list[dict[str, Any]] = [
        {"date": found["first"], "line_type": "opening_balance", "balance": found["opening"], **ends},
        *(dict(line) for line in found["lines"]),
        {"date": found["last"], "line_type": "closing_balance", "balance": found["closing"], **ends},
    ]
    shown = [
        {**row, **{name: "" if row[name] is None else cents(row[name], currency) for name in ("amount", "balance")}}
        for row in rows
    ]
    output.print_table(shown, _STATEMENT, "")


@command(invoices, "receipt", example="millrace invoices receipt 12 --output receipt.pdf")
@click.argument("payment", type=int)
@click.option("--output", "path", type=click.Path(path_type=Path), metavar="FILE", help="Default: receipt-<id>.pdf.")
def receipt(session: Session, payment: int, path: Path | None) -> None:
    """Save the receipt of a payment or refund as PDF. `millrace invoices payments` lists the payments."""
    _save(session, path or Path(f"receipt-{payment}.pdf"), session.client.payments.receipt(payment))


_LEDGER = [
    Column("id", "id", right=True),
    Column("time", "created_at", moment),
    Column("transaction", "transaction"),
    Column("account", "account"),
    Column("invoice", "invoice", lambda number: number or ""),
    Column("amount", "nano", output.nano_amount, right=True),
]


@command(
    invoices,
    "ledger",
    example="millrace invoices ledger --month 2026-11 --format datev --entity default",
    rows=True,
)
@click.option("--month", metavar="MONTH", help="Only this month, such as 2026-11.")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["table", "csv", "datev"]),
    default="table",
    help="csv and datev save the journal of all tenants of a billing entity in a month (operators). Default: table.",
)
@click.option("--entity", default="default", metavar="SLUG", help="Billing entity of the journal; default: default.")
@click.option(
    "--output", "path", type=click.Path(path_type=Path), metavar="FILE", help="Default: <entity>-<month>.csv."
)
def ledger(session: Session, limit: int, month: str | None, kind: str, entity: str, path: Path | None) -> None:
    """List the ledger entries, newest first, or save a month's journal of all tenants. Debits are positive."""
    if kind == "table":
        entries = session.client.ledger.list(**given_options({"month": month}))
        session.rows(entries, _LEDGER, limit=limit, empty="No ledger entries.")
        return
    if month is None:
        raise click.UsageError(f"--format {kind} needs --month, such as 2026-11.")
    entities = session.client.operator.entities
    ids = [row["id"] for row in entities.list() if row["slug"] == entity]
    if not ids:
        found = format_command("billing entities")
        raise click.UsageError(f"There is no billing entity {entity!r}. `{found}` lists them.")
    file_format: Any = kind
    content = entities.journal(ids[0], month=month, format=file_format)
    start = "EXTF_" if kind == "datev" else ""  # DATEV finds files by this start
    _save(session, path or Path(f"{start}{entity}-{month}.csv"), content)
