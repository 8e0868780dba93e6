"""An index that finds retries: requests of an end user with the same prompt. Built without blocking writes."""

from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):
    atomic = False

    dependencies = [
        ("request_log", "0005_requestrecord_cache_layer"),
    ]

    operations = [
        AddIndexConcurrently(
            model_name="requestrecord",
            index=models.Index(
                condition=models.Q(("retry_key__isnull", False)),
                fields=["tenant_id", "retry_key", "started_at"],
                name="request_log_retry",
            ),
        ),
    ]
