"""Publication of prices by the sole operator: scheduled, and cancelled before they take effect."""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models
from django.db.models import F, Q

from tenants.isolation.db_roles import SYSTEM
from tenants.migration_operations import SqlFiles

SQL = SqlFiles(__file__)
STATES = [(state, state.title()) for state in ("draft", "scheduled", "published", "discarded", "cancelled")]

# The earlier release knows neither state, and no version that its author published.
TO_EARLIER_STATES = (
    f"SET LOCAL ROLE {SYSTEM}",
    "UPDATE billing_priceversion SET state = 'discarded' WHERE state IN ('scheduled', 'cancelled')",
    "UPDATE billing_priceversion SET decided_by_id = NULL WHERE by_sole_operator AND state = 'published'",
    "RESET ROLE",
)


class Migration(migrations.Migration):
    dependencies: ClassVar = [
        ("billing", "0016_commitment_names"),
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
    ]

    operations: ClassVar = [
        migrations.AlterField(
            model_name="priceversion",
            name="state",
            field=models.CharField(choices=STATES, default="draft", max_length=10),
        ),
        migrations.AddField(
            model_name="priceversion",
            name="by_sole_operator",
            field=models.BooleanField(
                db_default=False, default=False, help_text="whether the author published it, without a second operator"
            ),
        ),
        migrations.AddField(model_name="priceversion", name="cancelled_at", field=models.DateTimeField(null=True)),
        migrations.AddField(
            model_name="priceversion",
            name="cancelled_by",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="+",
                to=settings.AUTH_USER_MODEL,
            ),
        ),
        migrations.AddIndex(
            model_name="priceversion",
            index=models.Index(
                condition=Q(state="scheduled"), fields=["effective_from"], name="price_version_scheduled"
            ),
        ),
        migrations.RemoveConstraint(model_name="priceversion", name="price_version_published"),
        migrations.RemoveConstraint(model_name="priceversion", name="price_version_second_person"),
        migrations.RunSQL(migrations.RunSQL.noop, TO_EARLIER_STATES),
        migrations.AddConstraint(
            model_name="priceversion",
            constraint=models.CheckConstraint(
                condition=~Q(state__in=["published", "scheduled"])
                | Q(number__isnull=False, effective_from__isnull=False),
                name="price_version_published",
            ),
        ),
        migrations.AddConstraint(
            model_name="priceversion",
            constraint=models.CheckConstraint(
                condition=~Q(state="published")
                | Q(decided_by__isnull=True)
                | ~Q(decided_by=F("created_by"))
                | Q(by_sole_operator=True),
                name="price_version_second_person",
            ),
        ),
        migrations.AddConstraint(
            model_name="priceversion",
            constraint=models.CheckConstraint(
                condition=Q(by_sole_operator=False, cancelled_at__isnull=True)
                & ~Q(state__in=["scheduled", "cancelled"])
                | Q(by_sole_operator=True, state__in=["scheduled", "published"], cancelled_at__isnull=True)
                & Q(effective_from__gte=F("decided_at") + timedelta(hours=1))
                | Q(by_sole_operator=True, state="cancelled", cancelled_at__isnull=False),
                name="price_version_sole_operator",
            ),
        ),
        SQL.functions("billing_guard_publication", "billing_guard_new_price"),
    ]
