"""`millrace tenants`: the commands by hand, which create tenants, change price books and record money (operators)."""

from __future__ import annotations

import re
from typing import Any

import click

from millrace.cli.app import Command, ResourceGroup, Session, command, given_options
from millrace.cli.output import (
    DEFAULT_CURRENCY,
    NANO_PER_USD,
    Column,
    amount_in_cents,
    cents,
    decimal,
    money,
    parse_amount,
)

_PPM_PER_PERCENT = 10**4
_TOKENS = re.compile(r"[0-9]{1,18}")


@click.group(cls=ResourceGroup)
def tenants() -> None:
    """Manage tenants (operators)."""


@command(tenants, "create", example="millrace tenants create acme --name Acme --owner owner@acme.example")
@click.argument("slug")
@click.option("--name", help="Name; default: the slug.")
@click.option("--owner", "owner_email", metavar="EMAIL", help="Email address that is invited as owner.")
def create_tenant(session: Session, slug: str, name: str | None, **fields: Any) -> None:
    """Create a tenant, and invite its owner."""
    tenant = session.client.operator.tenants.create(slug=slug, name=name or slug, **given_options(fields))
    session.done(tenant, f"Created the tenant {tenant['id']} ({slug}).")


@command(tenants, "price-book", example="millrace tenants price-book 3 --set enterprise")
@click.argument("id", type=int)
@click.option("--set", "book", metavar="NAME", help="Assign this price book from now on.")
def price_book(session: Session, id: int, book: str | None) -> None:
    """Show or change the price book of a tenant."""
    resource = session.client.operator.tenants
    if book is None:
        session.one(resource.price_book(id), [Column("price book", "book")])
    else:
        session.done(resource.set_price_book(id, book=book), f"Assigned the price book {book} to the tenant {id}.")


@command(tenants, "grant-credit", example="millrace tenants grant-credit 3 --amount 100 --expires 2027-01-01T00:00Z")
@click.argument("id", type=int)
@click.option("--amount", required=True, metavar="DECIMAL", help="Amount in the tenant's currency, such as 12.50.")
@click.option("--prepaid", is_flag=True, help="Pay the credit from the tenant's deposits; default: promotional credit.")
@click.option("--expires", "expires_at", metavar="TIME", help="Expiration; default: none.")
@click.option("--note", help="What the credit is for.")
def grant_credit(session: Session, id: int, amount: str, prepaid: bool, **fields: Any) -> None:
    """Grant credit to a tenant."""
    nano = parse_amount(amount, "the credit", NANO_PER_USD, "--amount")
    kind: Any = "prepaid" if prepaid else "promotional"
    credit = session.client.operator.tenants.grant_credit(id, grant_type=kind, nano=nano, **given_options(fields))
    granted = money(decimal(nano), credit["currency"])
    session.done(credit, f"Granted {granted} to the tenant {id} (credit {credit['id']}).")


@command(
    tenants,
    "record-payment",
    example="millrace tenants record-payment 3 --amount 250 --reference W-1 --received 2026-11-20T00:00Z",
)
@click.argument("id", type=int)
@click.option("--amount", required=True, metavar="DECIMAL", help="Amount, such as 12.50.")
@click.option("--currency", default=DEFAULT_CURRENCY, metavar="CODE", help="Currency of the amount; default: USD.")
@click.option("--reference", required=True, help="Reference of the payment, which is recorded once.")
@click.option("--received", "received_at", required=True, metavar="TIME", help="When the payment was received.")
@click.option("--invoice", metavar="NUMBER", help="Number of the invoice to pay first.")
@click.option("--as-credit", is_flag=True, default=None, help="Buy prepaid credit.")
@click.option("--note", help="Note about the payment.")
def record_payment(session: Session, id: int, amount: str, currency: str, **fields: Any) -> None:
    """Record a payment that was not made through a payment provider."""
    code: Any = currency.upper()
    paid = amount_in_cents(amount, code, "--amount")
    record = session.client.operator.tenants.record_payment
    payment = record(id, cents=paid, currency=code, **given_options(fields))
    session.done(payment, f"Recorded the payment {payment['id']}: {cents(paid, code)}.")


def _add_months(run: Command) -> Command:
    """Add the options of the months of a charge to a command."""
    options = (
        click.option("--first-month", required=True, metavar="MONTH", help="First month, such as 2026-12."),
        click.option("--last-month", metavar="MONTH", help="Last month; default: no end."),
        click.option(
            "--starts-on", metavar="DAY", help="A day of the first month, which is then charged from this day on."
        ),
    )
    for option in reversed(options):
        run = option(run)
    return run


@command(
    tenants,
    "add-commitment",
    example="millrace tenants add-commitment 3 --name Base --fee 500 --included 750 --first-month 2026-12",
)
@click.argument("id", type=int)
@click.option("--name", required=True, help="Name, which is printed on invoices.")
@click.option("--fee", required=True, metavar="DECIMAL", help="Fee per month before tax, in the tenant's currency.")
@click.option("--included", required=True, metavar="DECIMAL", help="Included usage per month, in the same currency.")
@click.option("--priority", type=int, help="Priority of the credit, lowest first; default: 50.")
@_add_months
def add_commitment(session: Session, id: int, fee: str, included: str, **fields: Any) -> None:
    """Add a monthly commitment to a tenant: a fee with included usage."""
    resource = session.client.operator.tenants
    nano = parse_amount(included, "the included usage", NANO_PER_USD, "--included")
    per_month = amount_in_cents(fee, resource.price_book(id)["currency"], "--fee")
    commitment = resource.add_commitment(id, fee=per_month, included_nano=nano, **given_options(fields))
    session.done(commitment, f"Added the commitment {commitment['id']} to the tenant {id}.")


@command(
    tenants,
    "add-price-term",
    example=(
        "millrace tenants add-price-term 3 graduated --model smollm2-135m --component output --price 0=3 "
        '--price 2000000=2.50 --description "Output by volume" --first-month 2026-12'
    ),
)
@click.argument("id", type=int)
@click.argument("term_type", metavar="TYPE", type=click.Choice(["graduated", "volume", "discount", "minimum"]))
@click.option("--description", required=True, help="Description, which is printed on invoices.")
@click.option("--amount", metavar="DECIMAL", help="Of a minimum: per month before tax, in the tenant's currency.")
@click.option("--percent", metavar="DECIMAL", help="Of a discount: percent, such as 12.5.")
@click.option("--model", help="Model of graduated and volume prices, or of a discount; default of a discount: all.")
@click.option("--tier", help="Service tier of graduated and volume prices; default: standard.")
@click.option("--component", help="Price component of graduated and volume prices, such as output.")
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="TOKENS=PRICE",
    help="Price per million tokens from this number of tokens on, such as 2000000=2.50; repeat for each tier.",
)
@_add_months
def add_price_term(
    session: Session,
    id: int,
    term_type: Any,
    amount: str | None,
    percent: str | None,
    prices: tuple[str, ...],
    **fields: Any,
) -> None:
    """Add a price term to a tenant: graduated or volume prices, a discount or a minimum charge."""
    resource = session.client.operator.tenants
    values = given_options(fields) | ({"tiers": [_read_tier(price) for price in prices]} if prices else {})
    if percent is not None:
        values["ppm"] = parse_amount(percent, "the discount", _PPM_PER_PERCENT, "--percent")
    if amount is not None:
        values["cents"] = amount_in_cents(amount, resource.price_book(id)["currency"], "--amount")
    term = resource.add_price_term(id, term_type=term_type, **values)
    session.done(term, f"Added the price term {term['id']} to the tenant {id}.")


def _read_tier(text: str) -> Any:
    start, separator, price = text.partition("=")
    if not separator or not _TOKENS.fullmatch(start):
        raise click.UsageError(f"--price {text!r} is not valid: give a number of tokens and a price, such as 0=2.50.")
    return {"from_tokens": int(start), "usd_per_million": price}
