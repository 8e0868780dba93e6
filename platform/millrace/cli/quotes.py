"""`millrace price`: the cost of usage at the prices of a file, and corrections of charged prices."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millrace.cli import output
from millrace.cli.app import ApiCommand, ResourceGroup, Session, command, fail, given_options, server_packages
from millrace.cli.output import DEFAULT_CURRENCY, Column, amount_of, money, number

if TYPE_CHECKING:
    from billing.rates.quotes import Quote

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)

_CHANGE = [
    Column("tenant", "tenant"),
    Column("invoice", "invoice"),
    Column("month", "month"),
    Column("difference", lambda row: money(row["difference_usd"], row["currency"]), right=True),
    Column("before tax", amount_of("subtotal"), right=True),
    Column("with tax", amount_of("total"), right=True),
    Column("note", "note"),
]


@click.group(cls=ResourceGroup, default="quote")
def price() -> None:
    """Compute what usage costs at the prices of a file, and correct prices of past usage."""


class _QuoteCommand(ApiCommand):
    example = "millrace price quote --rates rates.csv --usage usage.json --at 2026-03-01T16:30:00Z"


def _moment(_ctx: click.Context, _parameter: click.Parameter, text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a time. Give one like 2026-03-01T16:30:00Z.") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


@price.command("quote", cls=_QuoteCommand)
@click.option(
    "--rates", required=True, type=_FILE, metavar="FILE", help="Prices, as a CSV of `millrace prices import`."
)
@click.option("--usage", required=True, type=_FILE, metavar="FILE", help="Model, tier and tokens, as JSON.")
@click.option("--at", required=True, metavar="TIME", callback=_moment, help="Time of admission; without offset, UTC.")
@click.option("--currency", default=DEFAULT_CURRENCY, metavar="CODE", help="Currency of the prices; default: USD.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def print_quote(rates: Path, usage: Path, at: datetime, currency: str, as_json: bool) -> None:
    """Print the cost of a request in femto-USD, or 10^-15 of another currency, by component.

    The usage is JSON such as {"model": "m", "tier": "batch", "tokens": {"uncached": 1200, "output": 80}}.
    """
    with server_packages():
        from billing.rates.price_files import read_csv
        from billing.rates.pricing import UnknownPriceError
        from billing.rates.quotes import quote, read_usage
    path = usage
    try:
        quoted = read_usage(path.read_bytes())
        path = rates
        prices = read_csv(path.read_text(encoding="utf-8").splitlines())
        found = quote(prices, quoted, (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1))
    except UnknownPriceError as exc:
        fail(f"{path}: {exc} at this prompt length and time. Add one; a price of 0 must be set explicitly.")
    except (OSError, ValueError) as exc:
        fail(f"{path}: {exc}")
    row = {"model": quoted.model, "at": at.astimezone(UTC).isoformat(), **_as_json(found)}
    if as_json:
        output.print_json(row)
        return
    code = currency.upper()
    columns = [
        Column("component", "component"),
        Column("tokens", "tokens", number, right=True),
        Column(f"{code} per million", "usd_per_million", lambda text: money(text, code), right=True),
        Column(f"femto-{code}", "cost_femto", number, right=True),
    ]
    output.print_table(row["components"], columns, "No tokens.")
    total = money(row["cost_usd"], code)
    click.echo(f"\nTotal: {number(found.cost_femto)} femto-{code} ({total}), tier {found.tier}")


def _as_json(found: Quote) -> dict[str, Any]:
    from billing.currencies.amounts import FEMTO_DIGITS, NANO_DIGITS, decimal

    components = [
        {
            "component": line.component,
            "tokens": line.tokens,
            "usd_per_million": decimal(line.nano_per_million, NANO_DIGITS, 2),
            "cost_femto": line.cost_femto,
        }
        for line in found.lines
    ]
    cost_usd = decimal(found.cost_femto, FEMTO_DIGITS, 2)
    return {"tier": found.tier, "components": components, "cost_femto": found.cost_femto, "cost_usd": cost_usd}


@command(
    price,
    "rerate",
    example='millrace price rerate --rates right.csv --from 2026-10-01 --to 2026-11-01 --reason "Wrong output price"',
)
@click.argument("id", type=int, required=False)
@click.option("--rates", type=_FILE, metavar="FILE", help="Draft the corrected prices of this CSV.")
@click.option(
    "--from", "starts_at", metavar="TIME", callback=_moment, help="First time of admission; without offset, UTC."
)
@click.option("--to", "ends_at", metavar="TIME", callback=_moment, help="End of the times, exclusive.")
@click.option("--reason", help="Printed on the credit and debit notes.")
@click.option("--book", metavar="NAME", help="Price book; default: list.")
@click.option("--tenant", "tenant_id", type=int, metavar="ID", help="Correct this tenant's own prices.")
@click.option("--preview", "action", flag_value="preview", default="preview", help="Show the change of each invoice.")
@click.option("--apply", "action", flag_value="apply", help="Issue the notes. Another operator than the author must.")
@click.option("--discard", "action", flag_value="discard", help="Discard the draft.")
def rerate(session: Session, id: int | None, rates: Path | None, action: str, **fields: Any) -> None:
    """Correct the prices of usage that is invoiced, by credit and debit notes (operators).

    With --rates, drafts the correction and shows the change of each invoice. With an ID, shows, applies or discards it.
    """
    resource = session.client.operator.reratings
    if (id is None) == (rates is None):
        raise click.UsageError("Give either the ID of a re-rating or --rates FILE.")
    if rates is not None:
        names = {"starts_at": "--from", "ends_at": "--to", "reason": "--reason"}
        if missing := [option for name, option in names.items() if not fields[name]]:
            raise click.UsageError(f"Give {' and '.join(missing)} with --rates.")
        if action != "preview":
            raise click.UsageError(f"Draft with --rates first. Then use --{action} with the ID.")
        times = {name: fields.pop(name).isoformat() for name in ("starts_at", "ends_at")}
        made = resource.propose(csv=rates.read_text(encoding="utf-8"), **times, **given_options(fields))
        click.echo(f"Drafted the re-rating {made['id']}.", err=True)
        session.rows(resource.preview(made["id"]), _CHANGE, empty="No invoiced usage is affected.")
    elif id is None or action == "preview":
        session.rows(resource.preview(id or 0), _CHANGE, empty="No invoiced usage is affected.")
    elif action == "apply":
        session.done(resource.apply(id), f"Applied the re-rating {id}. Its notes are issued within minutes.")
    else:
        session.done(resource.discard(id), f"Discarded the re-rating {id}.")
