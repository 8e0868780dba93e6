"""Health checks of invoices, payment events and budgets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta

from django.db.models import Exists, OuterRef, Q

from billing.invoicing.files import missing_pdfs
from billing.models import BankEntry, Invoice, InvoiceRunFailure, PaymentEvent, Period
from inference_worker.contract.texts import Text
from millrace.apps.health.budget_usage import tenants_near_limits
from millrace.apps.health.issues import HealthIssue, IssueType, find_late, find_received
from tenants.models import Tenant

ASSIGNMENT_LATE = timedelta(days=3)  # since the bank statement was imported
INVOICE_LATE = timedelta(hours=1)  # since its period was closed


def _check_budgets(now: datetime) -> Iterator[HealthIssue]:
    near = tenants_near_limits(now)
    for tenant in Tenant.objects.all_tenants().filter(pk__in=near).order_by("pk"):
        budget, number = near[tenant.pk].budget, near[tenant.pk].budgets
        if budget.percent is None:
            title = Text(
                "%(tenant)s: budget “%(budget)s” has no budget left",
                "%(tenant)s: budget “%(budget)s” has no budget left, and %(more)s more",
                tenant=tenant.name,
                budget=budget.name,
                number=number,
                more=number - 1,
            )
        else:
            title = Text(
                "%(tenant)s: budget “%(budget)s” is %(percent)s%% used",
                "%(tenant)s: budget “%(budget)s” is %(percent)s%% used, and %(more)s more",
                tenant=tenant.name,
                budget=budget.name,
                percent=budget.percent,
                number=number,
                more=number - 1,
            )
        yield HealthIssue(
            IssueType.BUDGET,
            str(tenant.pk),
            urgent=budget.is_at_limit,
            title=title,
            todo=Text("Requests are being rejected. Raise the budget or contact the tenant.")
            if budget.is_at_limit
            else Text("Contact the tenant about raising the budget."),
            tenant=tenant,
        )


def _check_invoices(now: datetime) -> Iterator[HealthIssue]:
    """Yield tenants whose invoices of a month could not be finalized, with the reason of the last run, and months that
    could not be invoiced at all.
    """
    documents = Invoice.objects.all_tenants().filter(tenant=OuterRef("tenant"), period=OuterRef("period"))
    has_draft = Q(Exists(documents.filter(state=Invoice.State.DRAFT)))
    is_missing = ~Q(Exists(documents)) & Q(period__invoiced_at=None)
    failures = InvoiceRunFailure.objects.filter(has_draft | is_missing).select_related("tenant", "period__entity")
    tenants = set()
    for failure in failures.order_by("-period__ends_at", "pk"):
        if failure.tenant is None:
            yield _make_uninvoiced_issue(failure.period, failure.reason)
        elif failure.tenant_id not in tenants:
            tenants.add(failure.tenant_id)
            yield _make_unfinalized_issue(failure.tenant, failure.period, failure.reason)
    drafts = Invoice.objects.all_tenants().filter(
        state=Invoice.State.DRAFT, complete=True, period__closed_at__lt=now - INVOICE_LATE
    )
    late = drafts.exclude(tenant__in=tenants).select_related("tenant", "period")
    for draft in late.order_by("tenant_id", "-pk").distinct("tenant_id"):
        yield _make_unfinalized_issue(draft.tenant, draft.period)
    if number := missing_pdfs().filter(issued_at__lt=now - INVOICE_LATE).count():
        yield HealthIssue(
            IssueType.INVOICE,
            "pdf",
            urgent=True,
            title=Text("%(number)s final invoice has no PDF", "%(number)s final invoices have no PDF", number=number),
            todo=Text("Their emails wait for the PDF. Check the logs of the web jobs for invoice_pdf_failed."),
        )


def _make_unfinalized_issue(tenant: Tenant, period: Period, reason: str = "") -> HealthIssue:
    return HealthIssue(
        IssueType.INVOICE,
        str(tenant.pk),
        urgent=True,
        title=Text("%(name)s: invoice of %(label)s not finalized", name=tenant.name, label=period.label),
        todo=reason or Text("Finalize the draft to see what is missing, such as a tax rule or a VAT ID."),
        tenant=tenant,
    )


def _make_uninvoiced_issue(period: Period, reason: str) -> HealthIssue:
    return HealthIssue(
        IssueType.INVOICE,
        f"period-{period.pk}",
        urgent=True,
        title=Text("%(name)s: month %(label)s not invoiced", name=period.entity.name, label=period.label),
        todo=reason,
    )


def _check_payment_events(now: datetime) -> Iterator[HealthIssue]:
    """Return the payment providers with events that could not be booked and were not dismissed."""
    rows = PaymentEvent.objects.filter(status=PaymentEvent.Status.FAILED)
    return find_received(IssueType.PAYMENT, rows, "provider", _describe_payment_events, now)


def _describe_payment_events(provider: str, number: int) -> tuple[Text, Text]:
    title = Text(
        "%(number)s payment event of %(provider)s not booked",
        "%(number)s payment events of %(provider)s not booked",
        number=number,
        provider=provider,
    )
    return title, Text("Check their details, record the payments, then dismiss the events.")


def _check_bank_entries(now: datetime) -> Iterator[HealthIssue]:
    """Yield an issue if payments on bank statements have waited for their assignment for days."""
    rows = BankEntry.objects.filter(state=BankEntry.State.OPEN, statement__imported_at__lt=now - ASSIGNMENT_LATE)
    return find_late(IssueType.BANK_ENTRY, rows, "statement__imported_at", _describe_bank_entries, now, urgent=False)


def _describe_bank_entries(number: int) -> tuple[Text, Text]:
    title = Text(
        "%(number)s payment on bank statements is not assigned",
        "%(number)s payments on bank statements are not assigned",
        number=number,
    )
    return title, Text("Assign or dismiss them. Until then, reminders of paid invoices may be sent.")


CHECKS: tuple[Callable[[datetime], Iterable[HealthIssue]], ...] = (
    _check_budgets,
    _check_invoices,
    _check_payment_events,
    _check_bank_entries,
)
