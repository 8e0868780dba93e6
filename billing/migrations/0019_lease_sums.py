"""Sums of closed leases, whose rows are removed, and the progress of the reconciler."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.fields import ArrayField
from django.contrib.postgres.indexes import GinIndex
from django.db import migrations, models
from django.db.models import Q

from tenants.isolation import rls
from tenants.isolation.db_roles import SYSTEM
from tenants.migration_operations import SqlFiles

SQL = SqlFiles(
    __file__,
    # Of a budget `b` and a budget period `p`.
    limit="b.amount + p.rolled_over + CASE WHEN b.increase_expires_at > now() THEN b.temporary_increase ELSE 0 END",
    unit="array_position(ARRAY['money', 'tokens', 'requests'], p.unit::text)",
)
# The earlier release compares budget periods with the rows of their leases, so each sum becomes the row of one lease.
TO_LEASES = (
    f"SET LOCAL ROLE {SYSTEM}",
    """INSERT INTO billing_budgetlease (id, tenant_id, gateway_id, fencing_token, budget_period_ids, money, tokens,
        requests, settled_money, settled_tokens, settled_requests, fully_reserved, open, created_at, leased_until,
        reclaim_at)
    SELECT lease_ids[1], tenant_id, 'folded', fencing_tokens[1], budget_period_ids, 0, 0, 0, settled_money,
        settled_tokens, settled_requests, true, false, midnight.at, midnight.at, midnight.at
    FROM billing_budgetleasesum, LATERAL (SELECT day::timestamp AT TIME ZONE 'UTC' AS at) AS midnight""",
    "RESET ROLE",
)


class Migration(migrations.Migration):
    dependencies: ClassVar = [("billing", "0018_failover")]

    operations: ClassVar = [
        migrations.CreateModel(
            name="BudgetLeaseSum",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("tenant_id", models.BigIntegerField()),
                ("budget_period_ids", ArrayField(base_field=models.BigIntegerField(), size=None)),
                ("day", models.DateField()),
                ("lease_ids", ArrayField(base_field=models.BigIntegerField(), size=None)),
                (
                    "fencing_tokens",
                    ArrayField(
                        base_field=models.IntegerField(),
                        help_text="the last one of each lease, in the order of lease_ids",
                        size=None,
                    ),
                ),
                ("settled_money", models.DecimalField(decimal_places=0, help_text="femto-USD", max_digits=38)),
                ("settled_tokens", models.BigIntegerField()),
                ("settled_requests", models.BigIntegerField()),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant_id", "budget_period_ids", "day"), name="budget_lease_sum_once"
                    ),
                    models.CheckConstraint(
                        condition=Q(settled_money__gte=0, settled_requests__gte=0, settled_tokens__gte=0),
                        name="budget_lease_sum_counts",
                    ),
                ],
                "indexes": [
                    GinIndex(fields=["lease_ids"], name="budget_lease_sum_leases"),
                    GinIndex(fields=["budget_period_ids"], name="budget_lease_sum_periods"),
                ],
            },
        ),
        rls.operations("billing_budgetleasesum"),
        rls.revoke("INSERT, UPDATE, DELETE", "billing_budgetleasesum"),
        migrations.RunSQL(migrations.RunSQL.noop, TO_LEASES),
        migrations.RunSQL(
            [SQL.read("billing_adjust_lease_sums")],
            [
                "DROP FUNCTION billing_adjust",
                SQL.read("billing_adjust_of_tenant"),
            ],
        ),
        migrations.AddField(
            model_name="reconciliation",
            name="is_full",
            field=models.BooleanField(
                db_default=False,
                default=False,
                help_text="whether all of the last days was compared, not only changes",
            ),
        ),
        migrations.AddField(
            model_name="reconciliation",
            name="horizon",
            field=models.BigIntegerField(
                help_text="number of the first transaction that it may not have seen", null=True
            ),
        ),
    ]
