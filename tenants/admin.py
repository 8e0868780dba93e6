"""Read-only views of Django's admin under /operator/django-admin/ (MILLRACE_DJANGO_ADMIN). Only actions change rows."""

from __future__ import annotations

from typing import Any

from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount, SocialApp, SocialToken
from allauth.usersessions.models import UserSession
from django.contrib import admin
from django.contrib.auth.models import Group
from django.db import models
from django.http import HttpRequest

from tenants.models import (
    ApiKey,
    AuditEntry,
    LimitSet,
    Membership,
    OutboxEmail,
    Project,
    RoutingPolicy,
    RoutingPolicyDraft,
    Tenant,
    User,
    WebhookEndpoint,
)

# Models that packages register themselves, with secrets, and with changes that are not in the audit log.
admin.site.unregister((Authenticator, EmailAddress, Group, SocialAccount, SocialApp, SocialToken, UserSession))


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: models.Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: models.Model | None = None) -> bool:
        return False

    def get_fields(self, request: HttpRequest, obj: models.Model | None = None) -> list[Any]:
        """Return the names of all columns. Django would otherwise query choices of other tables without a scope."""
        return [field.name for field in self.opts.fields if field.name not in (self.exclude or ())]

    def get_readonly_fields(self, request: HttpRequest, obj: models.Model | None = None) -> list[Any]:
        return self.get_fields(request, obj)

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Any]:
        manager = self.model._default_manager
        all_tenants = getattr(manager, "all_tenants", None)
        rows: models.QuerySet[Any] = all_tenants() if all_tenants else manager.get_queryset()
        return rows


def register(model: type[models.Model], *columns: str, **options: Any) -> None:
    """Show a model read-only, with these columns in its list."""
    admin.site.register(model, ReadOnlyAdmin, list_display=columns, **options)


register(User, "email", "name", "is_staff", "is_active", search_fields=("email", "name"), exclude=("password",))
register(Tenant, "slug", "name", "status", "is_demo", "created_at")
register(Project, "slug", "tenant", "name", "created_at")
register(Membership, "user", "tenant", "role")
register(ApiKey, "prefix", "name", "tenant", "project", "created_at", "expires_at", "revoked_at", exclude=("key_hash",))
register(AuditEntry, "created_at", "action", "actor", "tenant_id", "object_type", "object_name")
register(LimitSet, "id", "__str__", "tenant")
register(RoutingPolicy, "id", "__str__", "tenant")
register(RoutingPolicyDraft, "id", "__str__", "tenant", "updated_at")
# The signing secret is derived from the nonces.
register(
    WebhookEndpoint, "url", "tenant", "active", "failing_since", "disabled_because", exclude=("nonce", "previous_nonce")
)
register(OutboxEmail, "subject", "tenant", "created_at", "state", "attempt_count", "sent_at")
register(Authenticator, "user", "type", "created_at", "last_used_at", exclude=("data",))
