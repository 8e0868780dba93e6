"""Who is who and who may do what: tenants, people, keys, limits and policies, and the records of their changes."""

from tenants.models.keys import ApiKey, KeySnapshot, KeyUse
from tenants.models.people import Invitation, Membership, User, UserManager
from tenants.models.records import AuditEntry, ChangeLog, IdempotentAnswer
from tenants.models.rules import LIMITS, LimitSet, RoutingPolicy
from tenants.models.tenancy import MAX_CONTENT_DAYS, Project, Tenant
from tenants.models.webhooks import Mail, WebhookAttempt, WebhookDelivery, WebhookEndpoint, WebhookEvent

__all__ = [
    "LIMITS",
    "MAX_CONTENT_DAYS",
    "ApiKey",
    "AuditEntry",
    "ChangeLog",
    "IdempotentAnswer",
    "Invitation",
    "KeySnapshot",
    "KeyUse",
    "LimitSet",
    "Mail",
    "Membership",
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
