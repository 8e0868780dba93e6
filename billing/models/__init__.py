"""What was used, what it costs, and what is owed."""

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
from billing.models.usage import MOST_TOKENS, TOKEN_CLASSES, UsageEvent, UsageQuarantine, Verdict

__all__ = [
    "ADDRESS",
    "MOST_TOKENS",
    "TOKEN_CLASSES",
    "Account",
    "BillingEntity",
    "BillingProfile",
    "BookAssignment",
    "Commitment",
    "CompiledSheet",
    "CreditGrant",
    "CreditUse",
    "ExchangeRate",
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
    "TaxCategory",
    "TaxRule",
    "UsageEvent",
    "UsageQuarantine",
    "Verdict",
]
