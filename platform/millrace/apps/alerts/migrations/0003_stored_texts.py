"""Store the summaries of alerts as sentences with values."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from tenants.migration_operations import store_texts
from tenants.text_field import UserTextField

_SENTENCES = (
    "API key %(name)s (%(prefix)s…) expires on %(expires_at)s",
    "Credit balance is %(left)s, below %(least)s",
    "%(title)s (since %(opened_at)s)",
)


class Migration(migrations.Migration):
    dependencies: ClassVar = [("alerts", "0002_sql")]

    operations: ClassVar = [
        migrations.AlterField(
            model_name="rulealert",
            name="summary",
            field=UserTextField(),
        ),
        store_texts(
            {
                ("alerts_rulealert", "summary"): 300,
            },
            _SENTENCES,
        ),
    ]
