"""Store the titles of health events as sentences with values."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from tenants.migration_operations import store_texts
from tenants.text_field import UserTextField

_SENTENCES = (
    (
        "%(number)s usage record is in quarantine (%(reason)s)",
        "%(number)s usage records are in quarantine (%(reason)s)",
    ),
    ("%(number)s payment event of %(provider)s not booked", "%(number)s payment events of %(provider)s not booked"),
    (
        "Reconciliation found %(number)s difference, %(corrected)s corrected; overdue leases: %(overdue)s",
        "Reconciliation found %(number)s differences, %(corrected)s corrected; overdue leases: %(overdue)s",
    ),
    "%(tenant)s: the webhook %(url)s was disabled",
    (
        "%(tenant)s: budget “%(budget)s” has no budget left",
        "%(tenant)s: budget “%(budget)s” has no budget left, and %(more)s more",
    ),
    (
        "%(tenant)s: budget “%(budget)s” is %(percent)s%% used",
        "%(tenant)s: budget “%(budget)s” is %(percent)s%% used, and %(more)s more",
    ),
    "%(name)s: invoice of %(label)s not finalized",
    "%(name)s: month %(label)s not invoiced",
    "No reconciliation for %(duration)s",
    "%(worker)s has been drained for %(duration)s",
    "%(worker)s has been cordoned for %(duration)s",
    "%(tenant)s: the webhook %(url)s has failed",
    "%(tenant)s: the webhook %(url)s has failed for %(duration)s",
    "%(replica)s sent no heartbeat for more than a minute",
    "%(replica)s sent no heartbeat for %(seconds)s s",
    "Disk almost full: %(free)s MiB free",
    "No replica available for %(name)s",
    "Cache hit rate of %(replica)s is %(difference)s of the prompt tokens below the prediction",
    ("%(number)s final invoice has no PDF", "%(number)s final invoices have no PDF"),
    "%(executions)s requests of the last day to %(model)s were not priced",
    "%(model)s: %(executions)s executions of the last day used more than was reserved",
    "%(model)s: %(tokens)s tokens since yesterday have no cost",
    ("%(number)s email has not been sent for an hour", "%(number)s emails have not been sent for an hour"),
    "%(worker)s could not load %(model)s",
    "The upstream of %(model)s is down",
    "%(replica)s accepts no new requests: disk almost full",
    "%(replica)s is slow: %(cause)s",
    "%(depth)s requests waiting for %(model)s, oldest %(oldest)s s",
    "%(backlog)s usage records to settle, oldest %(seconds)s s",
    "%(name)s has no price",
    "%(model)s: TTFT p95 is %(p95)s ms, above the target of %(objective)s ms",
    "%(model)s: %(failed)s of %(number)s requests failed during the last hour",
    ("The upstream of %(model)s fails for %(number)s tenant", "The upstream of %(model)s fails for %(number)s tenants"),
)


class Migration(migrations.Migration):
    dependencies: ClassVar = [("operations", "0005_truncate_inputs")]

    operations: ClassVar = [
        migrations.AlterField(
            model_name="healthevent",
            name="title",
            field=UserTextField(),
        ),
        store_texts(
            {
                ("operations_healthevent", "title"): 250,
            },
            _SENTENCES,
        ),
    ]
