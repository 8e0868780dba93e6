"""Indexes by which the reconciler reads only changes. They are created while leases and adjustments are written."""

from __future__ import annotations

from typing import ClassVar

from django.contrib.postgres.indexes import BrinIndex, GinIndex
from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import migrations


class Migration(migrations.Migration):
    atomic = False

    dependencies: ClassVar = [("billing", "0019_lease_sums")]

    operations: ClassVar = [
        AddIndexConcurrently("budgetlease", GinIndex(fields=["budget_period_ids"], name="budget_lease_periods")),
        AddIndexConcurrently(
            "adjustment", BrinIndex(autosummarize=True, fields=["created_at"], name="adjustment_created")
        ),
    ]
