"""What was used, what it costs, and what is owed."""

from billing.models.archives import UsageArchive
from billing.models.budgets import Budget, BudgetAlert
from billing.models.holds import Adjustment, Correction, EarlyRelease, Reconciliation, Slice, Window
from billing.models.invoicing import (
    ADDRESS,
    BillingEntity,
    BillingProfile,
    ExchangeRate,
    Invoice,
    InvoiceFile,
    InvoiceLine,
    InvoiceMail,
    NumberSeries,
    Period,
    TaxCategory,
    TaxRule,
)
from billing.models.ledger import (
    Account,
    Commitment,
    CreditGrant,
    CreditUse,
    LedgerEntry,
    LedgerTransaction,
    Payment,
)
from billing.models.prices import BookAssignment, CompiledSheet, Price, PriceBook, PriceVersion
from billing.models.rollups import GROUPED, SUMMED, RollupState, UsageChange, UsageRollup
from billing.models.usage import MAX_TOKENS, TOKEN_CLASSES, ExecutionOutcome, UsageEvent, UsageQuarantine

__all__ = [
    "ADDRESS",
    "GROUPED",
    "MAX_TOKENS",
    "SUMMED",
    "TOKEN_CLASSES",
    "Account",
    "Adjustment",
    "BillingEntity",
    "BillingProfile",
    "BookAssignment",
    "Budget",
    "BudgetAlert",
    "Commitment",
    "CompiledSheet",
    "Correction",
    "CreditGrant",
    "CreditUse",
    "EarlyRelease",
    "ExchangeRate",
    "ExecutionOutcome",
    "Invoice",
    "InvoiceFile",
    "InvoiceLine",
    "InvoiceMail",
    "LedgerEntry",
    "LedgerTransaction",
    "NumberSeries",
    "Payment",
    "Period",
    "Price",
    "PriceBook",
    "PriceVersion",
    "Reconciliation",
    "RollupState",
    "Slice",
    "TaxCategory",
    "TaxRule",
    "UsageArchive",
    "UsageChange",
    "UsageEvent",
    "UsageQuarantine",
    "UsageRollup",
    "Window",
]
