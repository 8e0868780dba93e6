"""Months of usage that were taken out of the database into files."""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models


class UsageArchive(models.Model):
    """A month whose partition was detached. Written by the tables' owner, in the transaction that detaches it."""

    month = models.DateField(primary_key=True, help_text="its first day")
    rows = models.BigIntegerField()
    sha256 = models.CharField(max_length=64, help_text="of its events as CSV")
    periods = ArrayField(models.BigIntegerField(), help_text="whose invoices its events are on")
    detached_at = models.DateTimeField()
    dropped_at = models.DateTimeField(null=True)
    restored_at = models.DateTimeField(null=True, help_text="None: it is not in the database")

    def __str__(self) -> str:
        return f"{self.month:%Y-%m}"
