"""Tenants and their projects."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.db.models import Q, Value

from tenants.isolation.scopes import TenantManager, TenantsManager
from tenants.tenant_settings import SETTINGS

MAX_SLUG_LENGTH = 50
# Constraints with names that are not those of their settings.
_CONSTRAINTS = {"semantic_cache_max_error_percent": "tenant_semantic_cache_max_error"}
_NO_DB_DEFAULT = {"db_default": models.NOT_PROVIDED}


def setting_options(name: str) -> dict[str, Any]:
    """Return the options of a setting's column: its default, its choices and its description."""
    setting = SETTINGS[name]
    choices = {} if setting.choices is None else {"choices": list(setting.choices.items())}
    return {"default": setting.default, "db_default": setting.default, "help_text": setting.description, **choices}


def setting_constraints() -> list[models.BaseConstraint]:
    """Return the constraints of the ranges and choices of the settings."""
    allowed: dict[str, Q] = {}
    for name, setting in SETTINGS.items():
        if setting.maximum is not None:
            allowed[name] = Q(**{f"{name}__range": (0, setting.maximum)})
        elif setting.choices is not None:
            allowed[name] = Q(**{f"{name}__in": list(setting.choices)})
    return [
        models.CheckConstraint(condition=condition, name=_CONSTRAINTS.get(name, f"tenant_{name}"))
        for name, condition in allowed.items()
    ]


class Tenant(models.Model):
    """A customer: the unit of isolation, limits and invoices.

    A tenant that will be deleted has `purge_after`. It is not served and can be restored until then; afterwards its
    data is removed. The row itself stays, because invoices and usage refer to it.
    """

    AUDITED: ClassVar = ("slug", "name", "status", "purge_after", *SETTINGS)

    class Status(models.TextChoices):
        ACTIVE = "active"
        SUSPENDED = "suspended"
        PURGED = "purged"

    slug = models.SlugField(max_length=MAX_SLUG_LENGTH, unique=True)
    name = models.CharField(max_length=200)
    status = models.CharField(max_length=20, choices=Status, default=Status.ACTIVE)
    is_demo = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)
    purge_after = models.DateTimeField(null=True, blank=True)
    # The settings: their types. All else is declared in tenants/tenant_settings.py.
    content_retention_days = models.SmallIntegerField(**setting_options("content_retention_days") | _NO_DB_DEFAULT)
    unknown_parameters = models.CharField(max_length=10, **setting_options("unknown_parameters"))
    allowed_origins = models.JSONField(
        blank=True,
        default=list,
        db_default=Value([], models.JSONField()),
        help_text=SETTINGS["allowed_origins"].description,
    )
    answer_cache_seconds = models.IntegerField(**setting_options("answer_cache_seconds"))
    answer_cache_sampled = models.BooleanField(**setting_options("answer_cache_sampled"))
    answer_cache_scope = models.CharField(max_length=10, **setting_options("answer_cache_scope"))
    semantic_cache_max_error_percent = models.SmallIntegerField(**setting_options("semantic_cache_max_error_percent"))
    cache_warming_nano = models.BigIntegerField(**setting_options("cache_warming_nano"))

    objects = TenantsManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["slug"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.CheckConstraint(
                condition=Q(status__in=["active", "suspended", "purged"]), name="tenant_status_known"
            ),
            *setting_constraints(),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def is_suspended(self) -> bool:
        """Whether the tenant is suspended, or will be deleted, and is therefore not served."""
        return self.status != self.Status.ACTIVE or self.purge_after is not None


class Project(models.Model):
    """A part of a tenant that owns API keys."""

    AUDITED: ClassVar = ("slug", "name")

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    slug = models.SlugField(max_length=MAX_SLUG_LENGTH)
    name = models.CharField(max_length=200)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["slug"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["tenant", "slug"], name="project_slug_unique"),
            models.UniqueConstraint(fields=["id", "tenant"], name="project_of_tenant"),  # for composite keys
        ]

    def __str__(self) -> str:
        return self.name
