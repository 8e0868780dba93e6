"""A tenant or a month that a run leaves out is a health issue with its reason until it is invoiced."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, datetime, timedelta

import pytest
from django.test import Client

from billing.invoicing import drafts, files, finalizing, runs
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.runs import invoice_months
from billing.models import Invoice, InvoiceRunFailure, TaxRule
from billing.periods import default_entity
from millrace.apps.health.health_checks import find_issues, record_issues
from millrace.apps.health.issues import HealthIssue, IssueType
from millrace.apps.health.models import HealthEvent
from tenants.actions import Conflict, do_create_tenant
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant, User
from tests.support.billing.books import OCTOBER, over, period, price, use
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]


class Killed(BaseException):
    """An error that simulates the end of a process."""


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    use(acme, OCTOBER, (price("3"), 10**6))
    use(do_create_tenant("other", "Other"), OCTOBER, (price("3", model="b"), 10**6))
    return acme


@pytest.fixture
def now(acme) -> datetime:
    return over(period(OCTOBER))


def invoice_issues(now: datetime) -> list[HealthIssue]:
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        return [issue for issue in find_issues(None, now) if issue.issue_type == IssueType.INVOICE]


def leave_out(monkeypatch: pytest.MonkeyPatch, module: object, name: str, slug: str, error: BaseException) -> None:
    """Let an action fail for one tenant."""
    whole: Callable[..., object] = getattr(module, name)

    def fail(*args: object) -> object:
        tenants = [getattr(each, "tenant_id", each) for each in args[:2]]
        if any(row.pk in tenants for row in unscoped(Tenant).filter(slug=slug)):
            raise error
        return whole(*args)

    monkeypatch.setattr(module, name, fail)


@pytest.mark.parametrize(
    ("module", "action", "error", "reason"),
    [
        (drafts, "_draft", Conflict("The usage is gone."), "The usage is gone."),
        (drafts, "_draft", ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (runs, "do_finalize", Conflict("There is no exchange rate."), "There is no exchange rate."),
        (finalizing, "_book", ValueError("x" * 600), "ValueError: xxx"),
    ],
)
def test_a_tenant_that_a_run_leaves_out_is_an_issue(acme, now, monkeypatch, module, action, error, reason):
    with monkeypatch.context() as patch:
        leave_out(patch, module, action, "acme", error)
        for _ in range(2):
            assert [line.partition(":")[0] for line in invoice_months(now=now).left] == ["acme 2026-10"]
    (issue,) = invoice_issues(now)
    assert (issue.subject, issue.title) == (str(acme.pk), "Acme: invoice of 2026-10 not finalized")
    assert issue.todo.startswith(reason)
    assert (issue.tenant, issue.urgent) == (acme, True)
    assert len(invoice_months(now=now).finalized) == 1
    assert invoice_issues(now) == invoice_issues(now + timedelta(days=9)) == []
    assert unscoped(InvoiceRunFailure).count() == 0


def test_a_month_that_cannot_be_invoiced_is_an_issue(acme, now, monkeypatch):
    def fail(*args: object) -> None:
        raise Conflict("Usage of 2026-10 is archived. Restore it first.")

    with monkeypatch.context() as patch:
        patch.setattr(runs, "do_draft", fail)
        assert invoice_months(now=now).finalized == []
    (issue,) = invoice_issues(now)
    assert issue.title.endswith(": month 2026-10 not invoiced")
    assert issue.todo == "Usage of 2026-10 is archived. Restore it first."
    assert len(invoice_months(now=now).finalized) == 2
    assert invoice_issues(now) == []


def test_the_issue_ends_when_the_draft_is_finalized_by_hand(acme, now, monkeypatch):
    with monkeypatch.context() as patch:
        leave_out(patch, runs, "do_finalize", "acme", Conflict("No rate."))
        invoice_months(now=now)
    assert [issue.todo for issue in invoice_issues(now)] == ["No rate."]
    (draft,) = unscoped(Invoice).filter(state="draft")
    do_finalize(draft, now)
    assert invoice_issues(now) == []


def test_a_run_of_one_tenant_keeps_the_reasons_of_others(acme, now, monkeypatch):
    with monkeypatch.context() as patch:
        leave_out(patch, runs, "do_finalize", "acme", Conflict("No rate."))
        leave_out(patch, runs, "do_finalize", "other", Conflict("No rule."))
        invoice_months(now=now)
        assert len(invoice_issues(now)) == 2
    invoice_months(month="2026-10", tenant=acme, now=now)
    assert [(issue.title, issue.todo) for issue in invoice_issues(now)] == [
        ("Other: invoice of 2026-10 not finalized", "No rule.")
    ]


def test_a_killed_run_has_stored_its_reasons(acme, now, monkeypatch):
    with monkeypatch.context() as patch:
        leave_out(patch, runs, "do_finalize", "acme", Conflict("No rate."))
        leave_out(patch, runs, "do_finalize", "other", Killed())
        with pytest.raises(Killed):
            invoice_months(now=now)
    assert [issue.todo for issue in invoice_issues(now)] == ["No rate."]


def test_a_run_that_is_too_early_is_no_issue(acme, now):
    assert len(invoice_months(month="2026-10", now=OCTOBER).left) == 1
    assert invoice_issues(now) == []


def test_final_invoices_without_a_pdf_are_an_issue(acme, now, monkeypatch):
    def fail(*args: object) -> None:
        raise ValueError("no such font")

    with monkeypatch.context() as patch:
        patch.setattr(files.pdf, "render_pdf", fail)
        assert len(invoice_months(now=now).finalized) == 2
    assert invoice_issues(now) == []
    later = now + timedelta(hours=2)
    assert [issue.title for issue in invoice_issues(later)] == ["2 final invoices have no PDF"]
    assert files.store_pdfs() == 2
    assert invoice_issues(later) == []


def test_operators_see_the_reason_in_their_language(acme, now, client: Client):
    """A tax rule for one country only leaves out both tenants. The event of alerts ends with the issue."""
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.create(
            entity=default_entity(), country="NL", category="Z", starts_on=date(2026, 1, 1), label="VAT"
        )
    assert len(invoice_months(now=now).left) == 2
    issue = invoice_issues(now)[0]
    assert issue.todo.startswith("No tax rule for a consumer in")
    record_issues(None, now)
    assert unscoped(HealthEvent).filter(issue_type="invoice", closed_at=None, title=issue.title)
    client.force_login(User.objects.create_superuser("op@example.com"))
    for language, text in (
        ("en", "No tax rule for a consumer"),
        ("de", "Keine Steuerregel für einen Käufer (consumer)"),
    ):
        page = client.get("/operator/", headers={"accept-language": language}).content.decode()
        assert text in page
    with all_tenants_scope(BypassReason.BILLING):
        TaxRule.objects.all().delete()
    assert len(invoice_months(now=now).finalized) == 2
    record_issues(None, now)
    assert not unscoped(HealthEvent).filter(issue_type="invoice", closed_at=None)
