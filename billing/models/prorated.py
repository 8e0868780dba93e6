"""Monthly charges whose first month may be charged in part."""

from __future__ import annotations

from django.db import models

from billing.rates.proration import DayShare, day_share


class ProratedCharge(models.Model):
    """A charge of each month. With `starts_on`, the first month is charged from this day on."""

    starts_on = models.DateField(
        null=True, help_text="day of the first month from which the month is charged; null: the whole month"
    )

    class Meta:
        abstract = True

    def share_in(self, month: str) -> DayShare:
        """Return the days of a month that are charged."""
        return day_share(self.starts_on, month)
