"""`millrace price`: the cost of usage at the prices of a file, without the platform."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millrace.cli import output
from millrace.cli.app import ApiCommand, ResourceGroup, fail, server_packages
from millrace.cli.output import Column, number, usd

if TYPE_CHECKING:
    from billing.pricing.quotes import Quote

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_LINE = [
    Column("component", "component"),
    Column("tokens", "tokens", number, right=True),
    Column("USD per million", "usd_per_million", usd, right=True),
    Column("femto-USD", "cost_femto", number, right=True),
]


@click.group(cls=ResourceGroup, default="quote")
def price() -> None:
    """Compute what usage costs at the prices of a file, offline."""


class _QuoteCommand(ApiCommand):
    example = "millrace price quote --rates rates.csv --usage usage.json --at 2026-03-01T16:30:00Z"


def _moment(_ctx: click.Context, _parameter: click.Parameter, text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a time. Give one like 2026-03-01T16:30:00Z.") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@price.command("quote", cls=_QuoteCommand)
@click.option(
    "--rates", required=True, type=_FILE, metavar="FILE", help="Prices, as a CSV of `millrace prices import`."
)
@click.option("--usage", required=True, type=_FILE, metavar="FILE", help="Model, tier and tokens, as JSON.")
@click.option("--at", required=True, metavar="TIME", callback=_moment, help="Time of admission; without offset, UTC.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def print_quote(rates: Path, usage: Path, at: datetime, as_json: bool) -> None:
    """Print the cost of a request in femto-USD, by component.

    The usage is JSON such as {"model": "m", "tier": "batch", "tokens": {"uncached": 1200, "output": 80}}.
    """
    with server_packages():
        from billing.pricing.price_files import read_csv
        from billing.pricing.pricing import UnknownPriceError
        from billing.pricing.quotes import quote, read_usage
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
    output.print_table(row["components"], _LINE, "No tokens.")
    click.echo(f"\nTotal: {number(found.cost_femto)} femto-USD ({usd(row['cost_usd'])}), tier {found.tier}")


def _as_json(found: Quote) -> dict[str, Any]:
    from billing.amounts import FEMTO_DIGITS, NANO_DIGITS, decimal

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
