"""Re-ratings: corrected prices of past usage, and the invoices that they changed."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import F, Q

from billing.models.invoicing import Invoice
from billing.models.prices import PriceBook
from tenants.isolation.scopes import TenantManager
from tenants.models import Tenant, User
from tenants.one_line_text import check_line


class Rerating(models.Model):
    """Corrected prices for usage that was admitted in a time range and charged by a book or by one tenant's own prices.

    It is a draft until a second user applies it. An applied re-rating never changes. `billing.rates.price_book` reads
    `body`.
    """

    class State(models.TextChoices):
        DRAFT = "draft"
        APPLIED = "applied"
        DISCARDED = "discarded"

    AUDITED: ClassVar = ("book_id", "tenant_id", "number", "state", "reason", "starts_at", "ends_at")

    book = models.ForeignKey(PriceBook, on_delete=models.PROTECT)
    tenant_id = models.BigIntegerField(null=True, help_text="whose own prices are corrected; None: the book's")
    number = models.IntegerField(null=True, unique=True, help_text="the order in which re-ratings were applied")
    state = models.CharField(max_length=10, choices=State, default=State.DRAFT)
    body = models.JSONField()
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    reason = models.CharField(max_length=200, validators=[check_line])
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")
    decided_at = models.DateTimeField(null=True)
    decided_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")
    has_metered = models.BooleanField(
        default=True,
        db_default=False,
        help_text="whether it corrects metered usage; False: an earlier release drafted it",
    )

    class Meta:
        ordering: ClassVar = ["-id"]
        constraints: ClassVar = [
            models.CheckConstraint(name="rerating_range", condition=Q(starts_at__lt=F("ends_at"))),
            models.CheckConstraint(
                name="rerating_numbered", condition=Q(state="applied", number__isnull=False) | ~Q(state="applied")
            ),
            models.CheckConstraint(
                name="rerating_second_person",
                condition=~Q(state="applied") | Q(decided_by__isnull=True) | ~Q(decided_by=F("created_by")),
            ),
        ]

    def __str__(self) -> str:
        return f"re-rating {self.pk}"


class ReratedInvoice(models.Model):
    """An invoice that a re-rating was applied to, once, with the note that it issued. Written with the note.

    Without a re-rating, usage of the invoice was reversed in a billing period, and this changed no cent.
    """

    rerating = models.ForeignKey(Rerating, on_delete=models.PROTECT, null=True, related_name="invoices")
    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    invoice = models.ForeignKey(Invoice, on_delete=models.PROTECT, related_name="reratings")
    note = models.OneToOneField(
        Invoice, on_delete=models.PROTECT, null=True, related_name="rerated", help_text="None: it changes no cent"
    )
    closed_periods = ArrayField(
        models.BigIntegerField(), help_text="the billing periods whose adjustments of the invoice's usage it includes"
    )
    rounding_femto = models.DecimalField(
        max_digits=38, decimal_places=0, default=0, help_text="billed too much by rounding; 0 with a note, which has it"
    )

    objects = TenantManager()

    class Meta:
        constraints: ClassVar = [
            models.UniqueConstraint(fields=["rerating", "invoice"], name="rerated_invoice_once"),
            models.UniqueConstraint(
                fields=["invoice", "closed_periods"], condition=Q(rerating=None), name="absorbed_reversal_once"
            ),
            models.CheckConstraint(
                name="absorbed_reversal_without_note", condition=Q(rerating__isnull=False) | Q(note=None)
            ),
        ]

    def __str__(self) -> str:
        what = "reversal" if self.rerating_id is None else f"re-rating {self.rerating_id}"
        return f"{what} of invoice {self.invoice_id}"
