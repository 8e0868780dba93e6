"""Health issues: conditions that an operator must handle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from django.db.models import Count, Min, QuerySet

from inference_worker.contract.texts import Text
from tenants.models import Tenant

MIN_REQUESTS = 20  # fewer are not evaluated


class IssueType(StrEnum):
    """The type of a health issue. Type and subject identify an issue until it is resolved."""

    BANK_ENTRY = "bank_entry"
    BROKER = "broker"
    BUDGET = "budget"
    BUNDLE = "bundle"
    CORDON = "cordon"
    COST = "cost"
    DISK = "disk"
    FAILURES = "failures"
    EMAIL = "email"
    INVOICE = "invoice"
    MODEL = "model"
    OBJECTIVE = "objective"
    OVERAGE = "overage"
    PAYMENT = "payment"
    PREFIX_ROUTING = "prefix_routing"
    PRICE = "price"
    PROCESS = "process"
    QUARANTINE = "quarantine"
    QUEUE = "queue"
    RECONCILIATION = "reconciliation"
    REPLICA = "replica"
    SCHEDULED_PRICES = "scheduled_prices"
    SETTLER = "settler"
    SLOW = "slow"
    UNPRICED = "unpriced"
    UNSETTLED = "unsettled"
    UPSTREAM = "upstream"
    UPSTREAM_PAUSE = "upstream_pause"
    VARIANT = "variant"
    WEBHOOK = "webhook"
    WORKER_NAME = "worker_name"


@dataclass(frozen=True)
class HealthIssue:
    """A condition that an operator must handle. `urgent`: it already affects customers or money."""

    issue_type: IssueType
    subject: str
    urgent: bool
    title: str
    todo: str
    tenant: Tenant | None = None


def find_received(
    issue_type: IssueType,
    rows: QuerySet[Any],
    column: str,
    describe: Callable[[str, int], tuple[Text, Text]],
    now: datetime,
) -> Iterator[HealthIssue]:
    """Yield an urgent issue for each value of a column, with the age of the row that was received first.

    Args:
        describe: returns the title and the instruction for a value and the number of its rows.
    """
    counts = rows.order_by().values_list(column).annotate(Count("pk"), Min("received_at")).order_by(column)
    for value, number, first in counts:
        title, todo = describe(value, number)
        yield HealthIssue(issue_type, value, urgent=True, title=add_age(title, first, now), todo=todo)


def find_late(
    issue_type: IssueType,
    rows: QuerySet[Any],
    column: str,
    describe: Callable[[int], tuple[Text, Text]],
    now: datetime,
    *,
    urgent: bool,
) -> Iterator[HealthIssue]:
    """Yield one issue if there are rows, with the age of the oldest.

    Args:
        column: the column with the time of a row.
        describe: returns the title and the instruction for the number of rows.
    """
    late = rows.aggregate(number=Count("pk"), first=Min(column))
    if late["number"]:
        title, todo = describe(late["number"])
        yield HealthIssue(issue_type, "", urgent=urgent, title=add_age(title, late["first"], now), todo=todo)


def add_age(title: str, first: datetime, now: datetime) -> str:
    """Return the title with the age of the oldest object, from a minute on."""
    if now - first < timedelta(minutes=1):
        return title
    return Text("%(title)s, oldest %(duration)s", title=title, duration=describe_duration(first, now))


def describe_duration(first: datetime, now: datetime) -> Text:
    """Return the time between, in whole minutes, hours or days."""
    minutes = int((now - first) / timedelta(minutes=1))
    if minutes < 60:
        return Text("%(number)s\xa0minute", "%(number)s\xa0minutes", number=minutes)
    if minutes < 24 * 60:
        return Text("%(number)s\xa0hour", "%(number)s\xa0hours", number=minutes // 60)
    return Text("%(number)s\xa0day", "%(number)s\xa0days", number=minutes // (24 * 60))
