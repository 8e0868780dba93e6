"""What the API and the console ask of webhooks. The tenant's scope must be open."""

from __future__ import annotations

from django.db.models import OuterRef, Prefetch, QuerySet, Subquery

from tenants.models import WebhookAttempt, WebhookDelivery, WebhookEndpoint


def endpoints_with_last(tenant_id: int) -> QuerySet[WebhookEndpoint]:
    """Endpoints, each with `last_at`, `last_status` and `last_error` of the newest try to send there."""
    tries = WebhookAttempt.objects.for_tenant(tenant_id).filter(delivery__endpoint=OuterRef("pk")).order_by("-pk")
    return WebhookEndpoint.objects.for_tenant(tenant_id).annotate(
        last_at=Subquery(tries.values("at")[:1]),
        last_status=Subquery(tries.values("status")[:1]),
        last_error=Subquery(tries.values("error")[:1]),
    )


def deliveries(tenant_id: int | None) -> QuerySet[WebhookDelivery]:
    """Deliveries with their events, endpoints and tries; None: of every tenant."""
    rows, tries = WebhookDelivery.objects, WebhookAttempt.objects
    if tenant_id is None:
        found, tried = rows.all_tenants(), tries.all_tenants()
    else:
        found, tried = rows.for_tenant(tenant_id), tries.for_tenant(tenant_id)
    return found.select_related("event", "endpoint").prefetch_related(Prefetch("attempts", tried.order_by("pk")))
