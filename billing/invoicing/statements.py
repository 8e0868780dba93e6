"""Statements of account with the addresses of seller and buyer, as PDF."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any, NamedTuple

from billing.accounting.booking_days import end_of
from billing.accounting.statements import LINE_TYPES, Statement, StatementLine, read_statement
from billing.currencies.amounts import dollars
from billing.invoicing.document import bank_words, day_words, party_words
from billing.invoicing.drafts import buyer_of
from billing.invoicing.pdf import typeset
from billing.models import BillingEntity, BillingProfile
from billing.periods import default_entity
from billing.pricing.currencies import currency_of
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant

_TEMPLATE = Path(__file__).with_name("statement.typ")


class CustomerAccount(NamedTuple):
    """A tenant as a customer of its billing entity."""

    tenant: Tenant
    entity: BillingEntity
    currency: str
    buyer: Mapping[str, str]


def find_account(tenant: Tenant) -> CustomerAccount:
    """Return the account of a tenant, with its current addresses."""
    with all_tenants_scope(BypassReason.BILLING):  # billing entities belong to no tenant
        profile = BillingProfile.objects.for_tenant(tenant).select_related("entity").first()
        entity = default_entity() if profile is None else profile.entity
        return CustomerAccount(tenant, entity, currency_of(tenant.pk), buyer_of(tenant, profile, entity))


def statement_of(account: CustomerAccount, first: date, last: date, now: datetime | None = None) -> Statement:
    """Return the statement of an account; inside a scope that sees the tenant's rows.

    Raises:
        ActionRefused: see `read_statement`.
    """
    return read_statement(account.tenant, account.entity, account.currency, first, last, now)


def statement_file_name(statement: Statement, ending: str) -> str:
    """Return the name of a file with the statement."""
    return f"statement-{statement.tenant}-{statement.first}-{statement.last}.{ending}"


def statement_as_pdf(account: CustomerAccount, statement: Statement) -> bytes:
    """Return the statement as PDF. The same statement and addresses give the same bytes."""
    seller, currency = account.entity.seller(), statement.currency
    words = {
        "title": "Statement of account",
        "number": f"{statement.first} – {statement.last}",
        "reason": "",
        "seller": party_words(seller),
        "buyer": party_words(account.buyer),
        "first": day_words(statement.first),
        "last": day_words(statement.last),
        "currency": currency,
        "time_zone": account.entity.time_zone,
        "payment": seller.get("payment_details", ""),
        "bank": bank_words(seller),
        "opening": dollars(statement.opening, currency),
        "closing": dollars(statement.closing, currency),
        "charged": dollars(statement.charged, currency),
        "paid": dollars(-statement.paid, currency),
        "lines": [_line_words(line, currency) for line in statement.lines],
    }
    return typeset(_TEMPLATE, words, end_of(statement.last, account.entity))


def _line_words(line: StatementLine, currency: str) -> dict[str, Any]:
    return {
        "on": day_words(line.on),
        "what": f"{LINE_TYPES[line.line_type]} {line.number}".strip(),
        "details": line.details,
        "amount": dollars(line.amount, currency),
        "balance": dollars(line.balance, currency),
    }
