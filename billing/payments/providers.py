"""The providers whose messages come over the web, by the name in their address."""

from __future__ import annotations

from billing.payments import Provider
from billing.payments.stripe import Stripe
from millrace.conf.environment import platform_settings


def by_webhook() -> dict[str, Provider]:
    """`/api/webhooks/payments/<name>` each."""
    providers: list[Provider] = [Stripe(platform_settings().stripe_webhook_secret)]
    return {provider.name: provider for provider in providers}
