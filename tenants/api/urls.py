"""The tenants' part of the management API, below /api/."""

from __future__ import annotations

from django.urls import path

from tenants.api import (
    credentials,
    jobs,
    keys,
    members,
    notifications,
    openapi,  # noqa: F401 - registers its scheme
    operators,
    policies,
    rules,
    tenancy,
    users,
    webhooks,
)

urlpatterns = [
    path("tenant", tenancy.TenantDetail.as_view(), name="api-tenant"),
    path("tenant/restore", tenancy.TenantRestore.as_view(), name="api-tenant-restore"),
    path("projects", tenancy.Projects.as_view(), name="api-projects"),
    path("projects/<int:pk>", tenancy.ProjectDetail.as_view(), name="api-project"),
    path("keys", keys.Keys.as_view(), name="api-keys"),
    path("keys/<int:pk>", keys.KeyDetail.as_view(), name="api-key"),
    path("keys/<int:pk>/rotate", keys.KeyRotate.as_view(), name="api-key-rotate"),
    path("members", members.Members.as_view(), name="api-members"),
    path("members/<int:pk>", members.MemberDetail.as_view(), name="api-member"),
    path("invitations", members.Invitations.as_view(), name="api-invitations"),
    path("invitations/<int:pk>", members.InvitationDetail.as_view(), name="api-invitation"),
    path("limits", rules.Limits.as_view(), name="api-limits"),
    path("limits/<int:pk>", rules.LimitsDetail.as_view(), name="api-limits-detail"),
    path("policies", rules.Policies.as_view(), name="api-policies"),
    path("policies/validate", policies.PolicyValidation.as_view(), name="api-policy-validate"),
    path("policy-drafts", policies.PolicyDrafts.as_view(), name="api-policy-drafts"),
    path("policy-drafts/<int:pk>", policies.PolicyDraftDetail.as_view(), name="api-policy-draft"),
    path("policy-drafts/<int:pk>/publish", policies.PolicyDraftPublish.as_view(), name="api-policy-draft-publish"),
    path("policies/<int:pk>/diff", policies.PolicyDiff.as_view(), name="api-policy-diff"),
    path("policies/<int:pk>", rules.PolicyDetail.as_view(), name="api-policy"),
    path("policies/<int:pk>/revert", rules.PolicyRevert.as_view(), name="api-policy-revert"),
    path("notifications", notifications.Notifications.as_view(), name="api-notifications"),
    path("notifications/read", notifications.NotificationsRead.as_view(), name="api-notifications-read"),
    path("jobs", jobs.Jobs.as_view(), name="api-jobs"),
    path("jobs/<int:pk>", jobs.JobDetail.as_view(), name="api-job"),
    path("jobs/<int:pk>/result", jobs.JobResultView.as_view(), name="api-job-result"),
    path("audit", tenancy.Audit.as_view(), name="api-audit"),
    path("audit/<int:pk>", tenancy.AuditDetail.as_view(), name="api-audit-entry"),
    path("webhooks", webhooks.Endpoints.as_view(), name="api-webhooks"),
    path("webhooks/<int:pk>", webhooks.EndpointDetail.as_view(), name="api-webhook"),
    path("webhooks/<int:pk>/rotate", webhooks.EndpointRotate.as_view(), name="api-webhook-rotate"),
    path("webhooks/<int:pk>/test", webhooks.EndpointTest.as_view(), name="api-webhook-test"),
    path("webhook-listeners", webhooks.Listeners.as_view(), name="api-webhook-listeners"),
    path("webhook-listeners/<int:pk>/poll", webhooks.ListenerPoll.as_view(), name="api-webhook-listener-poll"),
    path("webhook-events", webhooks.Events.as_view(), name="api-webhook-events"),
    path("webhook-events/<int:pk>", webhooks.EventDetail.as_view(), name="api-webhook-event"),
    path("webhook-deliveries", webhooks.Deliveries.as_view(), name="api-webhook-deliveries"),
    path("webhook-deliveries/<int:pk>", webhooks.DeliveryDetail.as_view(), name="api-webhook-delivery"),
    path("webhook-deliveries/<int:pk>/replay", webhooks.DeliveryReplay.as_view(), name="api-webhook-replay"),
    path("upstream-credentials", credentials.OwnCredentials.as_view(), name="api-credentials"),
    path("upstream-credentials/<int:pk>", credentials.OwnCredentialDetail.as_view(), name="api-credential"),
    path(
        "upstream-credentials/<int:pk>/rotate",
        credentials.OwnCredentialRotate.as_view(),
        name="api-credential-rotate",
    ),
    path("operator/upstream-credentials", credentials.PlatformCredentials.as_view(), name="api-operator-credentials"),
    path(
        "operator/upstream-credentials/reencrypt",
        credentials.PlatformCredentialsReencrypt.as_view(),
        name="api-operator-credentials-reencrypt",
    ),
    path(
        "operator/upstream-credentials/<int:pk>",
        credentials.PlatformCredentialDetail.as_view(),
        name="api-operator-credential",
    ),
    path(
        "operator/upstream-credentials/<int:pk>/rotate",
        credentials.PlatformCredentialRotate.as_view(),
        name="api-operator-credential-rotate",
    ),
    path("operator/tenants", operators.Tenants.as_view(), name="api-operator-tenants"),
    path("operator/tenants/<int:pk>", operators.TenantOne.as_view(), name="api-operator-tenant"),
    *(
        path(
            f"operator/tenants/<int:pk>/{action}",
            operators.TenantActionView.as_view(action_name=action),
            name=f"api-operator-tenant-{action}",
        )
        for action in operators.ACTIONS
    ),
    path("operator/users", users.Users.as_view(), name="api-operator-users"),
    path("operator/users/<int:pk>", users.UserOne.as_view(), name="api-operator-user"),
    *(
        path(
            f"operator/users/<int:pk>/{action}",
            users.UserActionView.as_view(action_name=action),
            name=f"api-operator-user-{action}",
        )
        for action in users.ACTIONS
    ),
    path("operator/notifications", notifications.OperatorNotifications.as_view(), name="api-operator-notifications"),
    path(
        "operator/notifications/read",
        notifications.OperatorNotificationsRead.as_view(),
        name="api-operator-notifications-read",
    ),
    path(
        "operator/notifications/channels",
        notifications.OperatorNotificationChannels.as_view(),
        name="api-operator-notification-channels",
    ),
    path("operator/workers", operators.Workers.as_view(), name="api-operator-workers"),
]
