"""`millrace manage generate_invoices`: the hourly invoicing task, run manually for a month and a tenant."""

from __future__ import annotations

import re
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from billing.currencies.amounts import dollars
from billing.invoicing.drafts import do_draft
from billing.invoicing.runs import invoice_months
from billing.models import Period
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.management.arguments import tenant_of_slug


class Command(BaseCommand):
    """Command that closes months, drafts their invoices and finalizes them."""

    help = "Invoice the months that are over: close them, and draft and finalize their invoices. May be run again."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--month", help="only this month, for example 2026-11")
        parser.add_argument("--tenant", help="only the tenant with this slug")
        parser.add_argument("--draft", action="store_true", help="draft, also a month that continues; finalize nothing")

    def handle(self, *args: Any, month: str | None, tenant: str | None, draft: bool, **options: Any) -> None:
        if month is not None and not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", month):
            raise CommandError("--month: give a month, for example 2026-11.")
        if draft and month is None:
            raise CommandError("--draft: name a --month.")
        only = None if tenant is None else tenant_of_slug(tenant)
        if draft:
            with all_tenants_scope(BypassReason.COMMAND):
                periods = list(Period.objects.filter(label=month).order_by("pk"))
            for invoice in [row for period in periods for row in do_draft(period, only)]:
                amount = dollars(invoice.total, invoice.currency)
                self.stdout.write(f"{invoice.tenant.slug}: {invoice.invoice_type} of {amount}, {invoice}")
            return
        report = invoice_months(month=month, tenant=only)
        for number in report.finalized:
            self.stdout.write(number)
        if report.left:
            raise CommandError("Left:\n" + "\n".join(report.left))
