"""Models of usage, prices, budgets, invoices and the ledger."""

from billing.models.archives import UsageArchive
from billing.models.budget_leases import (
    Adjustment,
    BudgetCorrection,
    BudgetLease,
    BudgetPeriod,
    EarlyRelease,
    Reconciliation,
)
from billing.models.budgets import Budget, BudgetAlert
from billing.models.invoicing import (
    ADDRESS,
    BillingEntity,
    BillingProfile,
    ExchangeRate,
    Invoice,
    InvoiceEmail,
    InvoiceFile,
    InvoiceLine,
    NumberSeries,
    Period,
    TaxCategory,
    TaxRule,
)
from billing.models.ledger import (
    Account,
    Commitment,
    CreditApplication,
    CreditGrant,
    LedgerEntry,
    LedgerTransaction,
    Payment,
)
from billing.models.prices import CompiledRateCard, Price, PriceBook, PriceBookAssignment, PriceVersion
from billing.models.rollups import GROUPED, SUMMED, RollupState, UsageChange, UsageRollup
from billing.models.usage import MAX_TOKENS, ExecutionOutcome, UsageEvent, UsageQuarantine, token_sum

__all__ = [
    "ADDRESS",
    "GROUPED",
    "MAX_TOKENS",
    "SUMMED",
    "Account",
    "Adjustment",
    "BillingEntity",
    "BillingProfile",
    "Budget",
    "BudgetAlert",
    "BudgetCorrection",
    "BudgetLease",
    "BudgetPeriod",
    "Commitment",
    "CompiledRateCard",
    "CreditApplication",
    "CreditGrant",
    "EarlyRelease",
    "ExchangeRate",
    "ExecutionOutcome",
    "Invoice",
    "InvoiceEmail",
    "InvoiceFile",
    "InvoiceLine",
    "LedgerEntry",
    "LedgerTransaction",
    "NumberSeries",
    "Payment",
    "Period",
    "Price",
    "PriceBook",
    "PriceBookAssignment",
    "PriceVersion",
    "Reconciliation",
    "RollupState",
    "TaxCategory",
    "TaxRule",
    "UsageArchive",
    "UsageChange",
    "UsageEvent",
    "UsageQuarantine",
    "UsageRollup",
    "token_sum",
]
