"""Store the reasons of failed runs, payments, top-ups and emails as sentences with values."""

from __future__ import annotations

from typing import ClassVar

from django.db import migrations

from tenants.migration_operations import store_texts
from tenants.text_field import UserTextField

_SENTENCES = (
    "Payment %(reference)s is in %(currency)s, but %(slug)s is billed in %(billed_currency)s. Record it in this currency.",
    "Payment %(reference)s was already recorded with another amount or tenant.",
    "Payment %(reference)s has no known tenant or invoice.",
    "Record payment %(refund_of)s first: %(reference)s refunds it.",
    "there is no price version %(version)s",
    "%(model)s (%(tier)s) has no price for %(component)s",
    "The payment has the status %(status)s.",
    "The mail server responded with %(code)s.",
    "The payment provider rejected the request: %(reason)s",
)


class Migration(migrations.Migration):
    dependencies: ClassVar = [("billing", "0014_end_user_rollups")]

    operations: ClassVar = [
        migrations.AlterField(
            model_name="invoicerunfailure",
            name="reason",
            field=UserTextField(),
        ),
        migrations.AlterField(
            model_name="paymentevent",
            name="detail",
            field=UserTextField(blank=True),
        ),
        migrations.AlterField(
            model_name="topup",
            name="detail",
            field=UserTextField(blank=True),
        ),
        migrations.AlterField(
            model_name="invoiceemail",
            name="error",
            field=UserTextField(blank=True, default="", help_text="why the last attempt failed"),
        ),
        migrations.AlterField(
            model_name="usagequarantine",
            name="detail",
            field=UserTextField(),
        ),
        store_texts(
            {
                ("billing_usagequarantine", "detail"): 1000000,
                ("billing_invoicerunfailure", "reason"): 500,
                ("billing_paymentevent", "detail"): 500,
                ("billing_topup", "detail"): 200,
                ("billing_invoiceemail", "error"): 200,
            },
            _SENTENCES,
        ),
    ]
