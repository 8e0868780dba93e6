"""Months of usage events that were moved from the database to files."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models


class UsageArchive(models.Model):
    """A month whose partition was detached. The tables' owner writes the row in the transaction that detaches it."""

    month = models.DateField(primary_key=True, help_text="first day of the month")
    rows = models.BigIntegerField()
    sha256 = models.CharField(max_length=64, help_text="of the events as CSV")
    periods = ArrayField(models.BigIntegerField(), help_text="billing periods whose invoices include its events")
    detached_at = models.DateTimeField()
    dropped_at = models.DateTimeField(null=True)
    restored_at = models.DateTimeField(null=True, help_text="None: not in the database")

    def __str__(self) -> str:
        return f"{self.month:%Y-%m}"
