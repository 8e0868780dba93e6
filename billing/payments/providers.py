"""The payment providers with webhooks, by the name in their URL."""

from __future__ import annotations

from django.conf import settings

from billing.payments import Provider
from billing.payments.stripe import Stripe


def by_webhook() -> dict[str, Provider]:
    """Return the providers by name: `/api/webhooks/payments/<name>`."""
    providers: list[Provider] = [Stripe(settings.MILLRACE.stripe_webhook_secret)]
    return {provider.name: provider for provider in providers}
