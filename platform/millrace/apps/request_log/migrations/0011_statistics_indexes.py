"""Indexes for statistics of a period: outcomes with times, and hits of the answer cache. Built without blocking writes."""

from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):
    atomic = False

    dependencies = [
        ("request_log", "0010_request_rollups"),
    ]

    operations = [
        AddIndexConcurrently(
            "requestrecord",
            models.Index(
                fields=["tenant_id", "started_at"], include=["outcome", "ttft_ms"], name="request_log_outcome"
            ),
        ),
        AddIndexConcurrently(
            "requestrecord",
            models.Index(
                condition=models.Q(("cache_layer__in", ("exact", "semantic"))),
                fields=["tenant_id", "started_at"],
                name="request_log_answer_hits",
            ),
        ),
    ]
