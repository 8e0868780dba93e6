"""Break-glass views under /ops/raw/. What has verbs in actions.py is read-only here: a row changed behind them would
leave its snapshot behind."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin
from django.db import models
from django.http import HttpRequest

from tenants.models import ApiKey, Membership, Project, Tenant, User


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
