"""Compare the tenant and a random fencing token of budget leases, whose IDs a failover can assign a second time."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from tenants.migration_operations import SqlFiles

SQL = SqlFiles(
    __file__,
    # Of a budget `b` and a budget period `p`.
    limit="b.amount + p.rolled_over + CASE WHEN b.increase_expires_at > now() THEN b.temporary_increase ELSE 0 END",
    unit="array_position(ARRAY['money', 'tokens', 'requests'], p.unit::text)",
)
FUNCTIONS = ("billing_lease_budget", "billing_settle", "billing_adjust")
DROP = [f"DROP FUNCTION {name}" for name in FUNCTIONS]


class Migration(migrations.Migration):
    dependencies: ClassVar = [("billing", "0017_sole_operator")]

    operations: ClassVar = [
        migrations.RunSQL(
            [*DROP, *(SQL.read(f"{name}_of_tenant") for name in FUNCTIONS)],
            [*DROP, *(SQL.read(name) for name in FUNCTIONS)],
        ),
    ]
