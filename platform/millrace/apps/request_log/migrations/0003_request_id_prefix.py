"""An index for searches by the beginning of a request ID. Built without blocking writes."""

from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations, models
from django.db.models.functions import Collate


class Migration(migrations.Migration):
    atomic = False

    dependencies = [
        ("request_log", "0002_requestrecord_ignored"),
    ]

    operations = [
        AddIndexConcurrently(
            model_name="requestrecord",
            index=models.Index(models.F("tenant_id"), Collate("request_id", "C"), name="request_log_id_prefix"),
        ),
    ]
