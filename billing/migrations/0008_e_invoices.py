"""Add what XRechnung requires: the seller's contact, the buyer reference, and the version of a document's format."""

from __future__ import annotations

from django.db import migrations, models

import billing.models.parties
import tenants.one_line_text


class Migration(migrations.Migration):

    dependencies = [("billing", "0007_ledger_created")]

    operations = [
        migrations.AddField(
            model_name="billingentity",
            name="contact_name",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="of the seller, for XRechnung",
                max_length=100,
                validators=[tenants.one_line_text.check_line],
            ),
        ),
        migrations.AddField(
            model_name="billingentity",
            name="contact_phone",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="of the seller, for XRechnung",
                max_length=50,
                validators=[billing.models.parties.check_phone],
            ),
        ),
        migrations.AddField(
            model_name="billingprofile",
            name="buyer_reference",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="BT-10 of EN 16931, such as a Leitweg-ID; with it, the XML is an XRechnung",
                max_length=100,
                validators=[tenants.one_line_text.check_line],
            ),
        ),
        migrations.AddField(
            model_name="invoice",
            name="format_version",
            field=models.SmallIntegerField(
                db_default=1, default=1, help_text="of the texts and XML; a final document keeps its own"
            ),
        ),
    ]
