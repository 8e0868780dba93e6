"""Models of tenants, users, API keys, limits, policies, the audit log and webhooks."""

from tenants.models.keys import ApiKey, ApiKeySnapshotRow, ApiKeyUsage
from tenants.models.outbox import OutboxRow
from tenants.models.people import Invitation, Membership, User, UserManager
from tenants.models.records import AuditEntry, ChangeEventRow, IdempotentResponse
from tenants.models.rules import LIMITS, LimitSet, RoutingPolicy
from tenants.models.tenancy import MAX_CONTENT_DAYS, MAX_ORIGIN_LENGTH, MAX_ORIGINS, MAX_SLUG_LENGTH, Project, Tenant
from tenants.models.webhooks import OutboxEmail, WebhookAttempt, WebhookDelivery, WebhookEndpoint, WebhookEvent

__all__ = [
    "LIMITS",
    "MAX_CONTENT_DAYS",
    "MAX_ORIGINS",
    "MAX_ORIGIN_LENGTH",
    "MAX_SLUG_LENGTH",
    "ApiKey",
    "ApiKeySnapshotRow",
    "ApiKeyUsage",
    "AuditEntry",
    "ChangeEventRow",
    "IdempotentResponse",
    "Invitation",
    "LimitSet",
    "Membership",
    "OutboxEmail",
    "OutboxRow",
    "Project",
    "RoutingPolicy",
    "Tenant",
    "User",
    "UserManager",
    "WebhookAttempt",
    "WebhookDelivery",
    "WebhookEndpoint",
    "WebhookEvent",
]
