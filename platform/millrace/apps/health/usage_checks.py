"""Health checks of usage: its quarantine, its reconciliation, its prices and its costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, QuerySet, Sum

from billing.currencies.amounts import DEFAULT_CURRENCY, FEMTO_A_NANO, exact_amount, half_up
from billing.models import (
    CompiledRateCard,
    DailyCost,
    ExecutionCost,
    PriceVersion,
    Reconciliation,
    UsageQuarantine,
    UsageRollup,
    totals_of,
)
from billing.pricing.currencies import other_currencies
from billing.rates.pricing import Tier
from inference_worker.contract.command_line import format_command
from inference_worker.contract.texts import Text
from millrace.apps.deployments.served_deployments import served_specs
from millrace.apps.health.issues import HealthIssue, IssueType, describe_duration, find_late, find_received

RECONCILED_LATE = timedelta(minutes=20)
PRICES_LATE = timedelta(minutes=2)  # since their time; the task that starts them runs every 10 seconds
_ADVICE = {
    False: Text("Budget periods were corrected. Find the cause. Overdue leases require a running settler."),
    True: Text(
        "Budget periods were corrected. Find the cause. Overdue leases require a running settler. A worker's journal"
        " has usage that was never settled: start a worker of that name, which sends it."
    ),
}

_QUARANTINE_ADVICE = {
    UsageQuarantine.Reason.UNDECODABLE: Text("Not a usage record. Find the process that writes to the usage stream."),
    UsageQuarantine.Reason.REFUSED: Text("Check the violated rule, publish missing prices, then settle again."),
    UsageQuarantine.Reason.UNPLACEABLE: Text("Restore the archive of their month, then settle again."),
    UsageQuarantine.Reason.CONFLICT: Text("Two counts of one request. The first is billed. Compare, then dismiss."),
}


def _check_quarantine(now: datetime) -> Iterator[HealthIssue]:
    rows = UsageQuarantine.objects.filter(resolved_at__isnull=True)
    return find_received(IssueType.QUARANTINE, rows, "reason", _describe_quarantine, now)


def _describe_quarantine(reason: str, number: int) -> tuple[Text, Text]:
    title = Text(
        "%(number)s usage record is in quarantine (%(reason)s)",
        "%(number)s usage records are in quarantine (%(reason)s)",
        number=number,
        reason=reason,
    )
    return title, _QUARANTINE_ADVICE[UsageQuarantine.Reason(reason)]


def _check_reconciliation(now: datetime) -> Iterator[HealthIssue]:
    last = Reconciliation.objects.order_by("-id").first()
    if last is None or now - last.created_at > RECONCILED_LATE:
        title = Text("No reconciliation yet")
        if last is not None:
            title = Text("No reconciliation for %(duration)s", duration=describe_duration(last.created_at, now))
        yield HealthIssue(
            IssueType.RECONCILIATION,
            "late",
            urgent=False,
            title=title,
            todo=Text("Reconciliation runs every five minutes. Check that beat and its worker are running."),
        )
    if last is not None and (last.differences or last.overdue_leases):
        title = Text(
            "Reconciliation found %(number)s difference, %(corrected)s corrected; overdue leases: %(overdue)s",
            "Reconciliation found %(number)s differences, %(corrected)s corrected; overdue leases: %(overdue)s",
            number=len(last.differences),
            corrected=last.corrected,
            overdue=last.overdue_leases,
        )
        yield HealthIssue(
            IssueType.RECONCILIATION,
            "differences",
            urgent=True,
            title=title,
            todo=_ADVICE[any("journal" in difference for difference in last.differences)],
        )


def _check_unrated(now: datetime) -> Iterator[HealthIssue]:
    rows = UsageRollup.objects.all_tenants().filter(
        bucket=totals_of(UsageRollup.Bucket.HOUR), start__gte=now - timedelta(days=1), tier="", completed__gt=0
    )
    return _find_by_model(IssueType.UNPRICED, rows, "completed", _describe_unrated)


def _describe_unrated(model: str, executions: int) -> tuple[Text, Text]:
    title = Text(
        "%(executions)s requests of the last day to %(model)s were not priced", executions=executions, model=model
    )
    return title, Text("These requests are not billed. Add prices for the unpriced token types.")


def _check_prices(now: datetime) -> Iterator[HealthIssue]:
    priced = set(
        CompiledRateCard.objects.filter(tenant_id=None, tier=Tier.STANDARD, effective_from__lte=now).values_list(
            "model", flat=True
        )
    )
    for spec in served_specs():
        if spec.name not in priced:
            yield HealthIssue(
                IssueType.PRICE,
                spec.name,
                urgent=True,
                title=Text("%(name)s has no price", name=spec.name),
                todo=Text("Its requests are rejected with 503 until a price is published."),
            )


def _check_scheduled_prices(now: datetime) -> Iterator[HealthIssue]:
    """Yield an issue if scheduled prices whose time has come have not taken effect."""
    rows = PriceVersion.objects.filter(state=PriceVersion.State.SCHEDULED, effective_from__lt=now - PRICES_LATE)
    return find_late(IssueType.SCHEDULED_PRICES, rows, "effective_from", _describe_scheduled_prices, now, urgent=True)


def _describe_scheduled_prices(number: int) -> tuple[Text, Text]:
    title = Text(
        "%(number)s scheduled price version has not taken effect",
        "%(number)s scheduled price versions have not taken effect",
        number=number,
    )
    todo = Text(
        "Requests have the earlier prices. Check that beat and the worker of the web jobs are running. If their"
        " log has scheduled_prices_failed, cancel the version and draft its prices again."
    )
    return title, todo


def _check_overages(now: datetime) -> Iterator[HealthIssue]:
    """Yield deployments whose upstream counted more tokens than were reserved."""
    rows = ExecutionCost.objects.filter(admitted_at__gte=now - timedelta(days=1), unbilled_femto__gt=0)
    sums = (
        rows.order_by()
        .values("model", "tenant_id")
        .annotate(executions=Count("request_id"), femto=Sum("unbilled_femto"))
    )
    others = other_currencies()
    executions, femto = Counter[str](), defaultdict[str, Counter[str]](Counter)
    for row in sums:
        executions[row["model"]] += row["executions"]
        femto[row["model"]][others.get(row["tenant_id"], DEFAULT_CURRENCY)] += int(row["femto"])
    for model, amounts in sorted(femto.items()):
        parts = (exact_amount(half_up(amount, FEMTO_A_NANO), code) for code, amount in sorted(amounts.items()))
        lost = " + ".join(parts)
        yield HealthIssue(
            IssueType.OVERAGE,
            model,
            urgent=False,
            title=Text(
                "%(model)s: %(executions)s executions of the last day used more than was reserved",
                model=model,
                executions=executions[model],
            ),
            todo=Text(
                "%(lost)s was not billed. Compare the provider's tokens with the reservation of its requests.",
                lost=lost,
            ),
        )


def _check_costs(now: datetime) -> Iterator[HealthIssue]:
    """Return the deployments with tokens of today and yesterday that have no cost."""
    rows = DailyCost.objects.filter(day__gte=(now - timedelta(days=1)).date(), uncosted_tokens__gt=0)
    return _find_by_model(IssueType.COST, rows, "uncosted_tokens", _describe_uncosted)


def _describe_uncosted(model: str, tokens: int) -> tuple[Text, Text]:
    title = Text("%(model)s: %(tokens)s tokens since yesterday have no cost", model=model, tokens=tokens)
    todo = Text(
        "The margin is too high. Import its cost card with `%(command)s`.", command=format_command("costs import")
    )
    return title, todo


def _find_by_model(
    issue_type: IssueType, rows: QuerySet[Any], column: str, describe: Callable[[str, int], tuple[Text, Text]]
) -> Iterator[HealthIssue]:
    """Yield an issue for each model.

    Args:
        describe: returns the title and the instruction for a model and the sum of the column.
    """
    for model, total in rows.order_by().values_list("model").annotate(Sum(column)).order_by("model"):
        title, todo = describe(model, total)
        yield HealthIssue(issue_type, model, urgent=False, title=title, todo=todo)


CHECKS: tuple[Callable[[datetime], Iterable[HealthIssue]], ...] = (
    _check_quarantine,
    _check_reconciliation,
    _check_unrated,
    _check_prices,
    _check_scheduled_prices,
    _check_overages,
    _check_costs,
)
