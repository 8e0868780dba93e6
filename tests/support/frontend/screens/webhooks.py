"""Screens of webhooks: a working and a disabled endpoint, a failed and a pending delivery."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from inference_worker.contract.texts import Text
from tests.support.frontend.console import Screen, World, register


def prepare(world: World) -> None:
    from tenants.actions import webhooks  # here: Django is not set up on import
    from tenants.isolation.scopes import tenant_scope
    from tenants.models import WebhookAttempt, WebhookDelivery

    for state in ("populated", "over"):
        tenant = world.tenants[state]
        well, _ = webhooks.do_create_endpoint(tenant, "https://hooks.example.com/millrace", description="Our books")
        ill, _ = webhooks.do_create_endpoint(tenant, "https://old.example.com/", event_types=["invoice.paid"])
        sent, failed = webhooks.do_send_test_event(well), webhooks.do_send_test_event(ill)
        webhooks.do_send_test_event(well)
        webhooks.do_disable_endpoint(ill, because=Text("The endpoint responded with 410 Gone."))
        webhooks.do_rotate_webhook_secret(well)
        now = datetime.now(UTC)
        with tenant_scope(tenant):
            for row, status, said in (
                (failed, None, Text("The TLS connection failed.")),
                (sent, 204, ""),
                (failed, 500, ""),
            ):
                WebhookAttempt.objects.create(
                    tenant=tenant,
                    delivery=row,
                    attempted_at=now,
                    status=status,
                    duration_ms=84,
                    error=said,
                    excerpt="<h1>No</h1>",
                )
            WebhookDelivery.objects.for_tenant(tenant).filter(pk=sent.pk).update(state="delivered", attempt_count=1)
        world.rows[f"{state}.endpoint"] = well.pk
        world.rows[f"{state}.delivery"] = failed.pk


def _endpoint(tenant: Any) -> int:
    """Return the demo tenant's endpoint. It is created with its deliveries, since the demo sends no events."""
    from tenants.models import WebhookEndpoint

    row = WebhookEndpoint.objects.for_tenant(tenant).order_by("pk").first() or _working_endpoint(tenant)
    return int(row.pk)


def _working_endpoint(tenant: Any) -> Any:
    """Create an endpoint with two delivered events and one that failed."""
    from django.db import transaction

    from tenants.actions import webhooks
    from tenants.models import WebhookAttempt

    url = "https://hooks.harbor-books.example/millrace"
    endpoint, _ = webhooks.do_create_endpoint(tenant, url, description="Accounting")
    for status, duration_ms, error in ((204, 84, ""), (None, 2004, Text("The TLS connection failed.")), (200, 61, "")):
        with transaction.atomic():  # the sender sees no pending delivery
            delivery = webhooks.do_send_test_event(endpoint)
            delivery.state, delivery.attempt_count = "delivered" if status else "failed", 1
            delivery.save(update_fields=["state", "attempt_count"])
            WebhookAttempt.objects.create(
                tenant=tenant,
                delivery=delivery,
                attempted_at=datetime.now(UTC),
                status=status,
                duration_ms=duration_ms,
                error=error,
                excerpt="",
            )
    return endpoint


def _delivery(tenant: Any) -> int:
    from tenants.models import WebhookDelivery

    endpoint = _endpoint(tenant)
    return int(WebhookDelivery.objects.for_tenant(tenant).filter(endpoint=endpoint).order_by("-pk")[1].pk)


ONE = ("populated",)
ENDPOINT = "/t/{slug}/webhooks/{endpoint}/"
register(
    Screen("webhooks", "/t/{slug}/webhooks/", queries=20),
    Screen("webhooks-filtered", "/t/{slug}/webhooks/?state=failed", 20, states=ONE),
    Screen("webhooks-new", "/t/{slug}/webhooks/new", 10, states=ONE),
    Screen("webhooks-detail", ENDPOINT, 12, states=ONE),
    Screen("webhooks-delete", f"{ENDPOINT}delete", 12, states=ONE),
    Screen("webhooks-delivery", "/t/{slug}/webhooks/deliveries/{delivery}", 14, states=ONE),
    prepare=prepare,
    theirs={
        "endpoint": lambda world: world.rows["populated.endpoint"],
        "delivery": lambda world: world.rows["populated.delivery"],
    },
    demo={"endpoint": _endpoint, "delivery": _delivery},
)
