"""Actions on alert channels: Slack-compatible webhooks and PagerDuty services."""

from __future__ import annotations

from urllib.parse import urlsplit

from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions.common import Conflict, FieldRefused, locked_tenant
from tenants.actions.webhooks import check_endpoint, check_endpoint_url, check_number_of_endpoints
from tenants.credentials.encryption import NoEncryptionKey, encrypt_secret
from tenants.models import Tenant, WebhookEndpoint
from tenants.webhooks.channels import PAGERDUTY_URLS, ROUTING_KEY


def do_create_slack_channel(
    tenant: Tenant, url: str, *, description: str = "", event_types: list[str] | None = None
) -> WebhookEndpoint:
    """Create a channel that sends messages to a Slack-compatible incoming webhook. Its URL is a secret.

    Raises:
        FieldRefused: the URL or an event type is not allowed. Conflict: the tenant has the maximum of endpoints.
    """
    checked = check_endpoint_url(url)
    parts = urlsplit(checked)
    row = WebhookEndpoint(
        kind=WebhookEndpoint.Kind.SLACK,
        url=f"{parts.scheme}://{parts.netloc}/…",
        description=description,
        event_types=sorted(set(event_types or ())),
    )
    return _create(tenant, row, checked)


def do_create_pagerduty_channel(
    tenant: Tenant, routing_key: str, *, region: str = "us", description: str = "", event_types: list[str] | None = None
) -> WebhookEndpoint:
    """Create a channel that triggers incidents of a PagerDuty service.

    Raises:
        FieldRefused: the routing key or an event type is not allowed.
        Conflict: the tenant has the maximum of endpoints.
    """
    if not ROUTING_KEY.fullmatch(routing_key):
        raise FieldRefused("routing_key", "invalid", Text("Enter the integration key of 32 letters and digits."))
    if region not in PAGERDUTY_URLS:
        raise FieldRefused(
            "region",
            "unknown",
            Text("The region must be one of %(regions)s.", regions=", ".join(PAGERDUTY_URLS)),
        )
    row = WebhookEndpoint(
        kind=WebhookEndpoint.Kind.PAGERDUTY,
        url=PAGERDUTY_URLS[region],
        description=description,
        event_types=sorted(set(event_types or ())),
    )
    return _create(tenant, row, routing_key)


def _create(tenant: Tenant, row: WebhookEndpoint, secret: str) -> WebhookEndpoint:
    with locked_tenant(tenant) as locked:
        check_number_of_endpoints(locked)
        row.tenant = locked
        try:
            encrypt_secret(row, secret)
        except NoEncryptionKey as exc:
            raise Conflict(Text("Channels need an encryption key. Contact the operator.")) from exc
        check_endpoint(row)
        row.save(force_insert=True)
        audit.record("channel.created", row, tenant_id=locked.pk, after=audit.serialize_for_audit(row))
    return row
