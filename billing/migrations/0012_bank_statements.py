"""Add bank statements and their payments, which only the system's role sees."""

from __future__ import annotations

from typing import ClassVar

import django.db.models.deletion
from django.db import migrations, models

import tenants.one_line_text
import tenants.text_field
from tenants.isolation import rls


class Migration(migrations.Migration):
    dependencies: ClassVar = [("billing", "0011_usage_shares")]

    operations: ClassVar = [
        migrations.CreateModel(
            name="BankStatement",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("account", models.CharField(help_text="IBAN", max_length=34)),
                ("statement_id", models.CharField(help_text="the bank's identifier", max_length=70)),
                (
                    "number",
                    models.CharField(blank=True, help_text="in the bank's series; empty: not numbered", max_length=70),
                ),
                (
                    "currency",
                    models.CharField(help_text="of all amounts, which are in its minor unit", max_length=3),
                ),
                ("opening", models.BigIntegerField()),
                ("closing", models.BigIntegerField()),
                ("closes_on", models.DateField(help_text="day of the closing balance")),
                ("others", models.IntegerField(default=0, help_text="booked entries that are no payments")),
                ("pending", models.IntegerField(default=0, help_text="entries that the bank has not booked")),
                ("file_name", models.CharField(max_length=200, validators=[tenants.one_line_text.check_line])),
                ("imported_at", models.DateTimeField(auto_now_add=True)),
            ],
            options={
                "constraints": [
                    models.UniqueConstraint(
                        fields=("account", "statement_id", "number"), name="bank_statement_once"
                    ),
                ],
            },
        ),
        migrations.CreateModel(
            name="BankEntry",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("line", models.IntegerField(help_text="of the file")),
                ("reference", models.CharField(max_length=200, unique=True)),
                ("cents", models.BigIntegerField(help_text="negative: the bank took back an earlier payment")),
                ("booked_on", models.DateField()),
                ("payer", models.CharField(blank=True, max_length=140)),
                ("remittance", models.CharField(blank=True, help_text="what the payer wrote", max_length=500)),
                (
                    "state",
                    models.CharField(
                        choices=[("booked", "Booked"), ("open", "Open"), ("dismissed", "Dismissed")], max_length=9
                    ),
                ),
                (
                    "problem",
                    tenants.text_field.UserTextField(blank=True, help_text="why it could not be booked"),
                ),
                (
                    "invoice",
                    models.ForeignKey(
                        help_text="that the texts name",
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="bank_entries",
                        to="billing.invoice",
                    ),
                ),
                (
                    "payment",
                    models.OneToOneField(
                        null=True,
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="bank_entry",
                        to="billing.payment",
                    ),
                ),
                (
                    "statement",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.PROTECT,
                        related_name="entries",
                        to="billing.bankstatement",
                    ),
                ),
            ],
            options={
                "indexes": [models.Index(condition=models.Q(("state", "open")), fields=["id"], name="bank_entry_open")],
                "constraints": [
                    models.CheckConstraint(condition=models.Q(("cents", 0), _negated=True), name="bank_entry_some"),
                    models.CheckConstraint(
                        condition=models.Q(
                            models.Q(("payment__isnull", False), ("state", "booked")),
                            models.Q(
                                models.Q(("state", "booked"), _negated=True), ("payment__isnull", True)
                            ),
                            _connector="OR",
                        ),
                        name="bank_entry_booked",
                    ),
                ],
            },
        ),
        rls.system_only("billing_bankstatement"),
        rls.revoke("ALL", "billing_bankstatement"),
        rls.system_only("billing_bankentry"),
        rls.revoke("ALL", "billing_bankentry"),
    ]
