"""Models of tenants, users, API keys, limits, policies, upstream credentials, the audit log and webhooks."""

from tenants.models.credentials import MAX_SECRET_LENGTH, UpstreamCredential
from tenants.models.experiments import Experiment
from tenants.models.jobs import TenantJob
from tenants.models.keys import ApiKey, ApiKeySnapshotRow, ApiKeyUsage
from tenants.models.notifications import Notification, NotificationChannel, NotificationRead
from tenants.models.outbox import OutboxRow
from tenants.models.people import Invitation, Membership, User, UserManager
from tenants.models.records import AuditEntry, ChangeEventRow, IdempotentResponse
from tenants.models.rules import LIMITS, LimitSet, RoutingPolicy, RoutingPolicyDraft
from tenants.models.tenancy import (
    MAX_SLUG_LENGTH,
    Project,
    Tenant,
)
from tenants.models.views import SavedView
from tenants.models.webhooks import OutboxEmail, WebhookAttempt, WebhookDelivery, WebhookEndpoint, WebhookEvent
