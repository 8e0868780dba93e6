"""`millrace tenants` and `users`: tenants, their credit and payments, and users (operators)."""

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
    moment,
    money,
    parse_amount,
    yes_no,
)

_TENANT = [
    Column("id", "id", right=True),
    Column("slug", "slug"),
    Column("name", "name"),
    Column("status", "status"),
    Column("created", "created_at", moment),
    Column("purged after", "purge_after", moment),
]
_USER = [
    Column("id", "id", right=True),
    Column("email", "email"),
    Column("name", "name"),
    Column("operator", "is_operator", yes_no),
    Column("second factor", "has_second_factor", yes_no),
    Column("state", lambda user: "active" if user["is_active"] else "inactive"),
    Column("last login", "last_login", moment),
]


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


@command(tenants, "show", example="millrace tenants show 3")
@click.argument("id", type=int)
def show_tenant(session: Session, id: int) -> None:
    """Show a tenant."""
    session.one(session.client.operator.tenants.get(id), _TENANT)


@command(tenants, "rename", example='millrace tenants rename 3 "Acme Corporation"')
@click.argument("id", type=int)
@click.argument("name")
def rename_tenant(session: Session, id: int, name: str) -> None:
    """Rename a tenant."""
    session.done(session.client.operator.tenants.update(id, name=name), f"Renamed the tenant {id}.")


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


@click.group(cls=ResourceGroup)
def users() -> None:
    """Manage users and operators (operators)."""


@command(users, "list", example="millrace users list --operator", rows=True)
@click.option("--search", metavar="TEXT", help="Part of the name or email address.")
@click.option("--operator/--no-operator", "is_operator", default=None, help="Only operators, or only other users.")
@click.option("--active/--inactive", "is_active", default=None, help="Only active users, or only deactivated ones.")
def list_users(session: Session, limit: int, **filters: Any) -> None:
    """List the users, newest first."""
    session.rows(session.client.operator.users.list(**given_options(filters)), _USER, limit=limit)


@command(users, "show", example="millrace users show 5")
@click.argument("id", type=int)
def show_user(session: Session, id: int) -> None:
    """Show a user."""
    session.one(session.client.operator.users.get(id), _USER)


def _user_action(name: str, text: str, done: str) -> None:
    @command(users, name, example=f"millrace users {name} 5")
    @click.argument("id", type=int)
    def run(session: Session, id: int) -> None:
        user = getattr(session.client.operator.users, name.replace("-", "_"))(id)
        session.done(user, done.format(email=user["email"]))

    users.commands[name].help = text


_user_action("deactivate", "Deactivate a user. All sessions of the user end.", "Deactivated {email}.")
_user_action("reactivate", "Reactivate a user.", "Reactivated {email}.")
_user_action("grant-operator", "Make a user an operator.", "{email} is an operator now.")
_user_action("revoke-operator", "Revoke the operator rights of a user.", "{email} is no longer an operator.")
_user_action("remove-second-factor", "Remove the second factor of a user.", "Removed the second factor of {email}.")
