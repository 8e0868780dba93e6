"""One index for the searches by a request's ID and by its beginning. It is created while records are written."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models


class Migration(migrations.Migration):
    atomic = False

    dependencies: ClassVar = [("request_log", "0002_sql")]

    operations: ClassVar = [
        AddIndexConcurrently(
            "requestrecord",
            models.Index(
                fields=["tenant_id", "request_id"],
                name="request_log_id",
                opclasses=["int8_ops", "varchar_pattern_ops"],
            ),
        ),
    ]
