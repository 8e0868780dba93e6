"""The trial balance of a billing entity: the balance and the turnover of each account of the ledger in a month.

Its postings are those of the journal. So the turnover of a month is the sum of its journal, and its closing balance is
the opening balance of the next month.
"""

from __future__ import annotations

from typing import NamedTuple

from billing.accounting.journal import require_begun, sum_accounts, sum_accounts_before
from billing.currencies.amounts import NANO_DIGITS, decimal, minor_digits
from billing.models import Account, BillingEntity

_ORDER = {account: place for place, account in enumerate(Account.values)}


class TrialBalanceRow(NamedTuple):
    """An account in a currency. Balances are positive on the debit side and negative on the credit side."""

    account: str
    currency: str
    opening: str
    debit: str
    credit: str
    closing: str


def compute_trial_balance(entity: BillingEntity, month: str) -> list[TrialBalanceRow]:
    """Return the accounts with bookings until the end of a month; inside `all_tenants_scope(…)`.

    Raises:
        FieldRefused: the month is in the future.
    """
    require_begun(entity, month)
    opening = {(row.currency, row.account): row.debit - row.credit for row in sum_accounts_before(entity, month)}
    turnover = {(row.currency, row.account): (row.debit, row.credit) for row in sum_accounts(entity, month)}
    rows = []
    for key in sorted({*opening, *turnover}, key=lambda key: (key[0], _ORDER[key[1]])):
        (currency, account), before, (debit, credit) = key, opening.get(key, 0), turnover.get(key, (0, 0))
        amounts = (before, debit, credit, before + debit - credit)
        rows.append(TrialBalanceRow(account, currency, *(format_nano(nano, currency) for nano in amounts)))
    return rows


def format_nano(nano: int, currency: str) -> str:
    """Return nano-units as a decimal with at least the decimals of the currency."""
    return decimal(nano, NANO_DIGITS, minor_digits(currency))
