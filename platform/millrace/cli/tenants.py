"""`millrace tenants`: the commands by hand, which create tenants, change price books and record money (operators)."""

from __future__ import annotations

from typing import Any

import click

from millrace.cli.app import ResourceGroup, Session, command, given_options
from millrace.cli.output import (
    DEFAULT_CURRENCY,
    NANO_PER_USD,
    Column,
    cents,
    decimal,
    money,
    parse_amount,
)


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
    from tenants.currencies import minor_digits

    code: Any = currency.upper()
    paid = parse_amount(amount, code, 10 ** minor_digits(code), "--amount")
    record = session.client.operator.tenants.record_payment
    payment = record(id, cents=paid, currency=code, **given_options(fields))
    session.done(payment, f"Recorded the payment {payment['id']}: {cents(paid, code)}.")
