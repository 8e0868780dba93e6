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


@admin.register(User)
class UserAdmin(ReadOnlyAdmin):
    list_display = ("email", "name", "is_staff", "is_active")
    search_fields = ("email", "name")
    exclude = ("password",)


@admin.register(Tenant)
class TenantAdmin(ReadOnlyAdmin):
    list_display = ("slug", "name", "status", "is_demo", "created_at")


@admin.register(Project)
class ProjectAdmin(ReadOnlyAdmin):
    list_display = ("slug", "tenant", "name", "created_at")


@admin.register(Membership)
class MembershipAdmin(ReadOnlyAdmin):
    list_display = ("user", "tenant", "role")


@admin.register(ApiKey)
class ApiKeyAdmin(ReadOnlyAdmin):
    list_display = ("prefix", "name", "tenant", "project", "created_at", "expires_at", "revoked_at")
    exclude = ("key_hash",)


@admin.register(AuditEntry)
class AuditEntryAdmin(ReadOnlyAdmin):
    list_display = ("created_at", "action", "actor", "tenant_id", "object_type", "object_name")


@admin.register(LimitSet)
class LimitSetAdmin(ReadOnlyAdmin):
    list_display = ("id", "__str__", "tenant")


@admin.register(RoutingPolicy)
class RoutingPolicyAdmin(ReadOnlyAdmin):
    list_display = ("id", "__str__", "tenant")


@admin.register(RoutingPolicyDraft)
class RoutingPolicyDraftAdmin(ReadOnlyAdmin):
    list_display = ("id", "__str__", "tenant", "updated_at")


@admin.register(WebhookEndpoint)
class WebhookEndpointAdmin(ReadOnlyAdmin):
    list_display = ("url", "tenant", "active", "failing_since", "disabled_because")
    exclude = ("nonce", "previous_nonce")  # the signing secret is derived from these


@admin.register(OutboxEmail)
class OutboxEmailAdmin(ReadOnlyAdmin):
    list_display = ("subject", "tenant", "created_at", "state", "attempt_count", "sent_at")


@admin.register(Authenticator)
class AuthenticatorAdmin(ReadOnlyAdmin):
    list_display = ("user", "type", "created_at", "last_used_at")
    exclude = ("data",)  # the secret
