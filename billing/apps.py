from __future__ import annotations

from django.apps import AppConfig


class BillingConfig(AppConfig):
    """Django configuration of billing."""

    name = "billing"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Let the gates of prepaid tenants follow bookings."""
        from billing.invoicing.prepayment import update_gate
        from billing.ledger.booking import follow_bookings

        follow_bookings(update_gate)
