"""Queries of webhooks for the API and the console. The tenant's scope must be open."""

from __future__ import annotations

from django.db.models import OuterRef, Prefetch, QuerySet, Subquery

from tenants.models import WebhookAttempt, WebhookDelivery, WebhookEndpoint


def endpoints_with_last(tenant_id: int) -> QuerySet[WebhookEndpoint]:
    """Return the endpoints with `last_at`, `last_status` and `last_error` of their newest attempt."""
    attempts = WebhookAttempt.objects.for_tenant(tenant_id).filter(delivery__endpoint=OuterRef("pk")).order_by("-pk")
    return WebhookEndpoint.objects.for_tenant(tenant_id).annotate(
        last_at=Subquery(attempts.values("attempted_at")[:1]),
        last_status=Subquery(attempts.values("status")[:1]),
        last_error=Subquery(attempts.values("error")[:1]),
    )


def deliveries(tenant_id: int | None) -> QuerySet[WebhookDelivery]:
    """Return deliveries with their events, endpoints and attempts; of all tenants if `tenant_id` is None."""
    rows, attempts = WebhookDelivery.objects, WebhookAttempt.objects
    if tenant_id is None:
        found, made = rows.all_tenants(), attempts.all_tenants()
    else:
        found, made = rows.for_tenant(tenant_id), attempts.for_tenant(tenant_id)
    return found.select_related("event", "endpoint").prefetch_related(Prefetch("attempts", made.order_by("pk")))
