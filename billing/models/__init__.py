"""Models of usage, prices, budgets, invoices and the ledger."""

from billing.models.accounting import ChartOfAccounts
from billing.models.archives import UsageArchive
from billing.models.bank import BankEntry, BankStatement
from billing.models.budget_leases import (
    Adjustment,
    BudgetCorrection,
    BudgetLease,
    BudgetLeaseSum,
    BudgetPeriod,
    EarlyRelease,
    Reconciliation,
)
from billing.models.budgets import Budget, BudgetAlert
from billing.models.costs import CostCard, DailyCost, ExecutionCost, SpendReservation
from billing.models.invoicing import (
    CHARGES,
    Invoice,
    InvoiceEmail,
    InvoiceFile,
    InvoiceLine,
    InvoiceRunFailure,
    NumberSeries,
    Period,
)
from billing.models.ledger import (
    Account,
    Commitment,
    CreditApplication,
    CreditGrant,
    LedgerEntry,
    LedgerTransaction,
    OneOffLine,
    Payment,
    PaymentEvent,
    TopUp,
)
from billing.models.metered import MeteredUsage
from billing.models.parties import ADDRESS, BillingEntity, BillingProfile, Party
from billing.models.prices import CompiledRateCard, Price, PriceBook, PriceBookAssignment, PriceVersion
from billing.models.reratings import ReratedInvoice, Rerating
from billing.models.rollups import (
    GROUPED,
    SUMMED,
    EndUserRollup,
    PeriodUsage,
    RollupState,
    UsageChange,
    UsageRollup,
    coarse_or,
    evaluated_once,
    not_rolled_up,
    not_rolled_up_by_end_user,
    totals_of,
)
from billing.models.taxes import ExchangeRate, TaxCategory, TaxRule, VatCheck
from billing.models.terms import PriceTerm
from billing.models.usage import MAX_TOKENS, ExecutionOutcome, UsageEvent, UsageQuarantine, UsageSource, token_sum
