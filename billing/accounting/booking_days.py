"""The days on which the ledger's transactions are booked, by the clocks of a billing entity.

The transaction of a document is booked on the day of issue, every other one on the day of its creation. So the books
of a day that is over do not change.
"""

from __future__ import annotations

from datetime import date, datetime, timedelta
from zoneinfo import ZoneInfo

from django.db.models import CharField, Min, Q, QuerySet, Value
from django.db.models.functions import Cast, Concat

from billing.models import BillingEntity, Invoice
from inference_worker.contract.texts import Text
from tenants.actions.common import FieldRefused

DOCUMENT_KEY = "invoice:"  # start of the keys of the documents' transactions


def booked_before(documents: QuerySet[Invoice], end: datetime) -> Q:
    """Return the filter of the ledger's entries that were booked before an instant.

    Args:
        documents: those of the entity or of the tenant, whose entries are selected.
    """
    return Q(transaction__key__in=document_keys(documents.filter(issued_at__lt=end))) | (
        ~Q(transaction__key__startswith=DOCUMENT_KEY) & Q(transaction__created_at__lt=end)
    )


def document_keys(documents: QuerySet[Invoice]) -> QuerySet[Invoice, str]:
    """Return the keys of the documents' transactions."""
    return documents.values_list(Concat(Value(DOCUMENT_KEY), Cast("pk", CharField())), flat=True)


def start_of(day: date, zone: ZoneInfo) -> datetime:
    """Return the first instant of a day."""
    return datetime(day.year, day.month, day.day, tzinfo=zone)


def today_of(entity: BillingEntity, now: datetime) -> date:
    """Return the day by the entity's clocks."""
    return now.astimezone(ZoneInfo(entity.time_zone)).date()


def end_of(day: date, entity: BillingEntity) -> datetime:
    """Return the first instant after a day by the entity's clocks."""
    return start_of(day + timedelta(days=1), ZoneInfo(entity.time_zone))


def require_past(field: str, day: date, entity: BillingEntity, now: datetime) -> None:
    """Check that a day of a report has started.

    Raises:
        FieldRefused: it is in the future.
    """
    today = today_of(entity, now)
    if day > today:
        raise FieldRefused(
            field, "future", Text("%(day)s is in the future. Use %(today)s or an earlier day.", day=day, today=today)
        )


def require_document(field: str, day: date, documents: QuerySet[Invoice], entity: BillingEntity) -> None:
    """Check that a document was issued on the day or before. Without any document, every day is accepted.

    Raises:
        FieldRefused: the first document is a later one.
    """
    first = documents.aggregate(first=Min("issued_at"))["first"]
    if first is not None and first >= end_of(day, entity):
        issued_on = first.astimezone(ZoneInfo(entity.time_zone)).date()
        raise FieldRefused(
            field,
            "before_documents",
            Text("The first document is of %(issued_on)s. Use this day or a later one.", issued_on=issued_on),
        )
