"""The panel that recomputes an invoice from its usage events and compares it with the ledger."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from billing.invoicing import checks
from billing.invoicing.lines import lines_of
from billing.models import Invoice
from frontend.core.backend_messages import translate_message
from frontend.core.numbers import Money, exact
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope


def check_invoice(pk: int, now: datetime) -> dict[str, Any]:
    """Recompute the invoice with this ID from its usage events and compare it. `message`: the reason why it was not
    checked. The caller has checked access to it.
    """
    with all_tenants_scope(BypassReason.BILLING):
        rows = Invoice.objects.all_tenants().select_related("entity", "period", "refers_to")
        invoice = rows.get(pk=pk)
        if invoice.state == Invoice.State.DRAFT:
            return {"message": _("Drafts are checked after they are finalized.")}
        try:
            check = checks.check(invoice)
        except Conflict as exc:
            return {"message": translate_message(exc)}
        lines = lines_of(invoice).count()
    difference = Money.cents(check.ledger_difference, invoice.currency)
    missing = Money.cents(check.month_difference, invoice.currency)
    lined = ngettext(
        "difference %(difference)s across %(lines)s line", "difference %(difference)s across %(lines)s lines", lines
    ) % {"difference": difference.text, "lines": lines}
    unrated = (
        _("%(unrated)s unpriced") % {"unrated": exact(check.unrated)} if check.unrated else _("all priced, 0 unpriced")
    )
    findings = (  # whether it is good, what was checked, details, and whether these are code
        (not check.unrated, _("%(events)s usage records") % {"events": exact(check.events)}, unrated, False),
        (not check.ledger_difference, _("Ledger equals line items"), lined, False),
        (
            not check.month_difference,
            _("Documents equal the month’s charges"),
            _("difference %(difference)s before tax") % {"difference": missing.text},
            False,
        ),
        (
            check.same_data,
            _("Recomputed from raw usage") if check.same_data else _("Raw usage differs"),
            f"sha256 {check.sha256[:4]}…{check.sha256[-4:]}",
            True,
        ),
        (
            check.same_pdf,
            _("PDF reproduces byte-for-byte") if check.same_pdf else _("Regenerated PDF differs"),
            _("identical to the sent PDF") if check.same_pdf else _("can be caused by another typesetter version"),
            False,
        ),
    )
    return {"message": "", "at": now, "good": all(finding[0] for finding in findings), "findings": findings}
