"""The monthly reports of a billing entity's accounts by name: trial balance and roll-forward of credit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from billing.accounting.prepaid_credit import CreditRollForwardRow, roll_forward_credit
from billing.accounting.trial_balance import TrialBalanceRow, compute_trial_balance
from billing.models import BillingEntity
from tenants import csv_tables

ReportRow = TrialBalanceRow | CreditRollForwardRow
# The functions and columns of the reports by name.
REPORTS: dict[str, tuple[Callable[[BillingEntity, str], Sequence[ReportRow]], tuple[str, ...]]] = {
    "trial-balance": (compute_trial_balance, TrialBalanceRow._fields),
    "prepaid-credit": (roll_forward_credit, CreditRollForwardRow._fields),
    "prepaid-credit-by-tenant": (partial(roll_forward_credit, by_tenant=True), CreditRollForwardRow._fields),
}


def report_as_csv(name: str, entity: BillingEntity, month: str) -> str:
    """Return a report with its heading as CSV; inside `all_tenants_scope(…)`.

    Raises:
        FieldRefused: the month is in the future.
    """
    function, columns = REPORTS[name]
    return csv_tables.as_csv(columns, function(entity, month))
