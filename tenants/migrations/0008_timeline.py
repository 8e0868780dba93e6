"""Add the function that returns the timeline of PostgreSQL, by which failovers are detected."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from tenants.migration_operations import SqlFiles

SQL = SqlFiles(__file__)


class Migration(migrations.Migration):
    dependencies: ClassVar = [("tenants", "0007_webhook_listeners")]

    operations: ClassVar = [SQL.functions("tenants_timeline")]
