"""Cancellations: the credit note over the whole of a voided invoice, and the invoice that replaces it."""

from __future__ import annotations

from typing import ClassVar

import django.db.models.deletion
from django.db import migrations, models

from tenants.isolation import rls


class Migration(migrations.Migration):
    dependencies: ClassVar = [("billing", "0003_charges")]

    operations: ClassVar = [
        migrations.AlterField(
            model_name="invoice",
            name="invoice_type",
            field=models.CharField(
                choices=[
                    ("invoice", "Invoice"),
                    ("purchase", "Purchase"),
                    ("correction", "Correction"),
                    ("credit_note", "Credit Note"),
                    ("debit_note", "Debit Note"),
                    ("cancellation", "Cancellation"),
                ],
                default="invoice",
                max_length=12,
            ),
        ),
        migrations.AddField(
            model_name="invoice",
            name="replaces",
            field=models.ForeignKey(
                help_text="the cancelled invoice",
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="replacements",
                to="billing.invoice",
            ),
        ),
        migrations.AddConstraint(
            model_name="invoice",
            constraint=models.UniqueConstraint(
                condition=models.Q(("invoice_type", "cancellation")),
                fields=("refers_to",),
                name="invoice_cancelled_once",
            ),
        ),
        rls.same_tenant("billing_invoice", "replaces_id", "billing_invoice"),
    ]
