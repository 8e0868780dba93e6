"""Add the first days of charges whose first month is prorated, and one-off lines that repeat."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations, models

_STARTS_ON = "day of the first month from which the month is charged; null: the whole month"


class Migration(migrations.Migration):
    dependencies: ClassVar = [("billing", "0012_bank_statements")]

    operations: ClassVar = [
        migrations.AddField("commitment", "starts_on", models.DateField(help_text=_STARTS_ON, null=True)),
        migrations.AddField("priceterm", "starts_on", models.DateField(help_text=_STARTS_ON, null=True)),
        migrations.AddField(
            "oneoffline",
            "last_month",
            models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="of a line that repeats; empty: charged once",
                max_length=7,
            ),
        ),
        migrations.AlterField(
            "oneoffline",
            "invoice",
            models.ForeignKey(
                help_text="None: not billed yet, or repeats",
                null=True,
                on_delete=models.PROTECT,
                related_name="one_off_lines",
                to="billing.invoice",
            ),
        ),
        migrations.AddConstraint(
            "oneoffline",
            models.CheckConstraint(
                condition=models.Q(
                    ("last_month", ""),
                    models.Q(("invoice__isnull", True), ("last_month__gte", models.F("month"))),
                    _connector="OR",
                ),
                name="one_off_line_months",
            ),
        ),
        migrations.AlterField(
            "invoiceline",
            "line_type",
            models.CharField(
                choices=[
                    ("usage", "Usage"),
                    ("commitment", "Commitment"),
                    ("prepaid", "Prepaid"),
                    ("credit", "Credit"),
                    ("one_off", "One Off"),
                    ("recurring", "Recurring"),
                    ("metered", "Metered"),
                    ("term", "Term"),
                    ("rounding", "Rounding"),
                ],
                default="usage",
                max_length=10,
            ),
        ),
    ]
