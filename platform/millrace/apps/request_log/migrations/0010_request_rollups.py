"""Sums of requests by day, and triggers that write the days that change after their end.

Existing days are summed by the next run of `request_log.update_rollups`. Until then, queries read the requests.
"""

from __future__ import annotations

from typing import Any

from django.db import migrations, models

from tenants.isolation import rls
from tenants.isolation.db_roles import APP

_PLACE = "SELECT DISTINCT tenant_id, (started_at AT TIME ZONE 'UTC')::date"
_BEFORE_TODAY = "started_at < date_trunc('day', clock_timestamp(), 'UTC')"
# A record can also change the success of an earlier request with the same prompt, and replace the record of another
# gateway that has begun the same line of a batch.
TRIGGERS = f"""
CREATE FUNCTION request_log_records_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO request_log_changedday (tenant_id, day)
    {_PLACE} FROM (
        SELECT tenant_id, started_at FROM added
        UNION ALL
        SELECT r.tenant_id, r.started_at FROM added a JOIN request_log_requestrecord r
            ON r.tenant_id = a.tenant_id AND r.request_id = a.request_id
        WHERE a.batch_id IS NOT NULL
        UNION ALL
        SELECT r.tenant_id, r.started_at FROM added a JOIN request_log_requestrecord r
            ON r.tenant_id = a.tenant_id AND r.retry_key = a.retry_key
            AND r.started_at BETWEEN a.started_at - interval '1 day' AND a.started_at
        WHERE a.retry_key IS NOT NULL
    ) changed WHERE {_BEFORE_TODAY};
    RETURN NULL;
END $$;
CREATE FUNCTION request_log_usage_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO request_log_changedday (tenant_id, day)
    {_PLACE} FROM (
        SELECT r.tenant_id, r.started_at FROM added a JOIN request_log_requestrecord r
            ON r.tenant_id = a.tenant_id AND r.request_id = split_part(a.request_id, '.', 1)
    ) changed WHERE {_BEFORE_TODAY};
    RETURN NULL;
END $$;
CREATE TRIGGER request_log_changed AFTER INSERT ON request_log_requestrecord
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION request_log_records_changed();
CREATE TRIGGER request_log_changed AFTER INSERT ON billing_usageevent
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION request_log_usage_changed();
CREATE TRIGGER request_log_changed AFTER INSERT ON billing_adjustment
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION request_log_usage_changed();
CREATE TRIGGER request_log_changed AFTER INSERT ON feedback_submittedfeedback
    REFERENCING NEW TABLE AS added FOR EACH STATEMENT EXECUTE FUNCTION request_log_usage_changed();
"""
NO_TRIGGERS = """
DROP TRIGGER request_log_changed ON feedback_submittedfeedback;
DROP TRIGGER request_log_changed ON billing_adjustment;
DROP TRIGGER request_log_changed ON billing_usageevent;
DROP TRIGGER request_log_changed ON request_log_requestrecord;
DROP FUNCTION request_log_usage_changed();
DROP FUNCTION request_log_records_changed();
"""
_READ_ONLY = "request_log_requestrollup, request_log_requestrollupstate"
_COUNTS = ("succeeded", "feedback", "bad_feedback", "schema_failures", "tool_failures", "retried", "cancelled", "errors")
_TOKENS = ("input_tokens", "read_tokens", "output_tokens", "hit_input", "hit_output")


def _bigints(names: tuple[str, ...]) -> list[tuple[str, models.Field[Any, Any]]]:
    return [(name, models.BigIntegerField()) for name in names]


class Migration(migrations.Migration):

    dependencies = [
        ("request_log", "0009_shadow_comparison"),
        ("billing", "0021_rollup_totals"),
        ("feedback", "0001_initial"),
        ("tenants", "0002_row_level_security"),
    ]

    operations = [
        migrations.CreateModel(
            name="RequestRollup",
            fields=[
                ("pk", models.CompositePrimaryKey("tenant_id", "day", "project_id", "served_model", "policy", "cache_layer", "answer_miss", blank=True, editable=False, primary_key=True, serialize=False)),
                ("tenant_id", models.BigIntegerField()),
                ("day", models.DateField()),
                ("project_id", models.BigIntegerField()),
                ("served_model", models.CharField(max_length=128)),
                ("policy", models.TextField(help_text="name and version of the routing policy; empty: none")),
                ("cache_layer", models.CharField(choices=[("exact", "Exact"), ("single_flight", "Single Flight"), ("semantic", "Semantic"), ("prefix", "Prefix"), ("host_memory", "Host Memory"), ("computed", "Computed")], max_length=16)),
                ("answer_miss", models.TextField(help_text="why the answer cache did not serve the request; empty: no miss")),
                ("requests", models.BigIntegerField(help_text="that were tried")),
                *_bigints(_COUNTS),
                ("cost_femto", models.DecimalField(decimal_places=0, max_digits=38)),
                ("layer_requests", models.BigIntegerField(help_text="with a known cache layer; the following columns are theirs")),
                *_bigints(_TOKENS),
                ("saved_femto", models.DecimalField(decimal_places=0, max_digits=38)),
                ("host_tokens", models.BigIntegerField()),
                ("misses", models.BigIntegerField(help_text="requests that the answer cache did not serve")),
            ],
        ),
        migrations.CreateModel(
            name="ChangedDay",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("tenant_id", models.BigIntegerField()),
                ("day", models.DateField()),
                ("changed_at", models.DateTimeField(db_default=models.Func(function="clock_timestamp"))),
            ],
            options={"indexes": [models.Index(fields=["tenant_id", "day"], name="request_log_changed_day")]},
        ),
        migrations.CreateModel(
            name="RequestRollupState",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("built_from", models.DateField()),
                ("built_until", models.DateField()),
            ],
        ),
        rls.operations("request_log_requestrollup"),
        rls.operations("request_log_changedday"),
        migrations.RunSQL(
            f"REVOKE INSERT, UPDATE, DELETE ON {_READ_ONLY} FROM {APP}",
            f"GRANT INSERT, UPDATE, DELETE ON {_READ_ONLY} TO {APP}",
        ),
        migrations.RunSQL(TRIGGERS, NO_TRIGGERS),
    ]
