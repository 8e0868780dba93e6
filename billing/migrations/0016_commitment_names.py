"""Refuse control characters in the names of commitments, which are printed on invoices."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models

from tenants.one_line_text import check_line


class Migration(migrations.Migration):
    dependencies: ClassVar = [("billing", "0015_stored_texts")]

    operations: ClassVar = [
        migrations.AlterField(
            "commitment",
            "name",
            models.CharField(help_text="printed on invoices", max_length=100, validators=[check_line]),
        ),
    ]
