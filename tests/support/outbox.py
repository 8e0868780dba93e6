"""Delivery of outboxes by tests, which call it as the web jobs do."""

from __future__ import annotations

from datetime import datetime


def send_emails(now: datetime | None = None) -> int:
    """Send all due emails to members. Return the number of sent emails."""
    from tenants.outbox.email_outbox import MEMBER_EMAILS  # here: imported before Django is set up

    return MEMBER_EMAILS.send_due(now)["sent"]


def send_webhooks() -> int:
    """Send all due webhook deliveries, one after another. Return the number of attempts."""
    from tenants.webhooks.sending import WEBHOOKS

    return WEBHOOKS.send_due().total()
