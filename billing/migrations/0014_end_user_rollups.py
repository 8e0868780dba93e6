"""Add the end user of usage events, and the sums of usage by end user."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models

from billing.usage_views import FIRST_CHANGES, usage_views
from tenants.isolation import rls
from tenants.migration_operations import SqlFiles

# The columns of usage events and adjustments with the tokens of a priced component, in the order of `price_ids`.
TOKENS = (
    *("uncached", "cache_read", "cache_write_5m", "cache_write_1h", "output"),
    *("answer_hit_input", "answer_hit_output", "searches"),
)
SQL = SqlFiles(__file__)
_COUNTS = ("completed", "cancelled", "failed", *TOKENS[:7])
_AMOUNTS = ("cost_femto", "saved_femto")


class Migration(migrations.Migration):
    dependencies: ClassVar = [("billing", "0013_proration_and_recurring_lines")]

    operations: ClassVar = [
        migrations.AddField(
            model_name="usageevent",
            name="end_user",
            field=models.CharField(db_default="", help_text="`user` of the request", max_length=128),
        ),
        usage_views(TOKENS, TOKENS, changes_before=FIRST_CHANGES),
        migrations.AddField(
            model_name="rollupstate",
            name="end_users_before",
            field=models.DateTimeField(help_text="the progress of the rollups of end users", null=True),
        ),
        migrations.RunSQL(
            [SQL.read("billing_end_users_settled_before")], ["DROP FUNCTION billing_end_users_settled_before()"]
        ),
        migrations.CreateModel(
            name="EndUserRollup",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                *((name, models.BigIntegerField()) for name in _COUNTS),
                ("searches", models.BigIntegerField(db_default=0, help_text="of cross-encoders")),
                ("unpinned_tokens", models.BigIntegerField()),
                ("reasoning_tokens", models.BigIntegerField(db_default=0, help_text="part of output")),
                *((name, models.DecimalField(decimal_places=0, max_digits=38)) for name in _AMOUNTS),
                ("tenant_id", models.BigIntegerField()),
                ("project_id", models.BigIntegerField()),
                ("key_id", models.BigIntegerField()),
                ("model", models.CharField(max_length=128)),
                ("end_user", models.CharField(max_length=128, null=True)),
                ("start", models.DateTimeField()),
            ],
            options={
                "indexes": [
                    models.Index(fields=["start"], name="end_user_rollup_start"),
                    models.Index(fields=["key_id", "start"], name="end_user_rollup_key", condition=~models.Q(key_id=0)),
                    models.Index(
                        fields=["tenant_id", "start"], name="end_user_rollup_total", condition=models.Q(key_id=0)
                    ),
                    models.Index(fields=["tenant_id", "end_user", "start"], name="end_user_rollup_user"),
                ],
                "constraints": [
                    models.UniqueConstraint(
                        fields=("tenant_id", "start", "key_id", "project_id", "model", "end_user"),
                        name="end_user_rollup_once",
                        nulls_distinct=False,
                    )
                ],
            },
        ),
        rls.operations("billing_enduserrollup"),
        rls.revoke("INSERT, UPDATE, DELETE", "billing_enduserrollup"),
    ]
