"""Break-glass views under /ops/raw/. What has verbs in actions.py is read-only here: a row changed behind them would
leave its snapshot behind."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from allauth.account.models import EmailAddress
from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount, SocialApp, SocialToken
from django.contrib import admin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.contrib.auth.models import Group
from django.db import models
from django.http import HttpRequest, HttpResponse

from tenants import audit
from tenants.models import (
    ApiKey,
    AuditEntry,
    LimitSet,
    Mail,
    Membership,
    Project,
    RoutingPolicy,
    Tenant,
    User,
    WebhookEndpoint,
)

# What the packages register of themselves, to be changed by hand and without an audit row, secrets included.
admin.site.unregister((Authenticator, EmailAddress, Group, SocialAccount, SocialApp, SocialToken))


@admin.register(User)
class UserAdmin(DjangoUserAdmin):  # type: ignore[type-arg]
    ordering = ("email",)
    list_display = ("email", "name", "is_staff", "is_active")
    search_fields = ("email", "name")
    fieldsets = (
        (None, {"fields": ("email", "password", "name")}),
        ("Access", {"fields": ("is_active", "is_staff", "is_superuser")}),
    )
    add_fieldsets = ((None, {"fields": ("email", "usable_password", "password1", "password2")}),)

    def has_delete_permission(self, request: HttpRequest, obj: models.Model | None = None) -> bool:
        """Nobody is deleted here: their memberships would go with them, a tenant's last owner too. Deactivate them."""
        return False

    def save_model(self, request: HttpRequest, obj: User, form: Any, change: bool) -> None:
        old = User.objects.filter(pk=obj.pk).first()
        before = None if old is None else audit.described(old)
        super().save_model(request, obj, form, change)
        verb = "user.create" if before is None else "user.update"
        audit.record_person(verb, obj, before=before, after=audit.described(obj))

    def user_change_password(self, request: HttpRequest, id: str, form_url: str = "") -> HttpResponse:
        response = super().user_change_password(request, id, form_url)
        user = self.get_object(request, id)
        if response.status_code == HTTPStatus.FOUND and user is not None:
            audit.record_person("user.password_changed", user)
        return response


class ReadOnlyAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: models.Model | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: models.Model | None = None) -> bool:
        return False

    def get_fields(self, request: HttpRequest, obj: models.Model | None = None) -> list[Any]:
        """Every column by name: to find them itself, Django would make choices of other tables' unscoped rows."""
        return [field.name for field in self.opts.fields if field.name not in (self.exclude or ())]

    def get_readonly_fields(self, request: HttpRequest, obj: models.Model | None = None) -> list[Any]:
        return self.get_fields(request, obj)

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Any]:
        manager = self.model._default_manager
        all_tenants = getattr(manager, "all_tenants", None)
        rows: models.QuerySet[Any] = all_tenants() if all_tenants else manager.get_queryset()
        return rows


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
    list_display = ("at", "verb", "actor", "tenant_id", "object_type", "object_name")


@admin.register(LimitSet)
class LimitSetAdmin(ReadOnlyAdmin):
    list_display = ("id", "__str__", "tenant")


@admin.register(RoutingPolicy)
class RoutingPolicyAdmin(ReadOnlyAdmin):
    list_display = ("id", "__str__", "tenant")


@admin.register(WebhookEndpoint)
class WebhookEndpointAdmin(ReadOnlyAdmin):
    list_display = ("url", "tenant", "active", "failing_since", "disabled_because")
    exclude = ("nonce", "old_nonce")  # its secret is made of these


@admin.register(Mail)
class MailAdmin(ReadOnlyAdmin):
    list_display = ("subject", "tenant", "created_at", "tries", "sent_at")


@admin.register(Authenticator)
class AuthenticatorAdmin(ReadOnlyAdmin):
    """Second factors: one whose owner has lost it can be taken away, and that is written down."""

    list_display = ("user", "type", "created_at", "last_used_at")
    exclude = ("data",)  # the secret

    def has_delete_permission(self, request: HttpRequest, obj: models.Model | None = None) -> bool:
        return True

    def delete_model(self, request: HttpRequest, obj: Authenticator) -> None:
        super().delete_model(request, obj)
        audit.record_person("user.second_factor_removed", obj.user)

    def delete_queryset(self, request: HttpRequest, queryset: models.QuerySet[Authenticator]) -> None:
        for one in queryset:
            self.delete_model(request, one)
