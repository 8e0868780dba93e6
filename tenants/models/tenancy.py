"""Tenants and their projects."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q, Value

from tenants.isolation.scopes import TenantManager, TenantsManager

MAX_CONTENT_DAYS = 90
MAX_ANSWER_CACHE_SECONDS = 30 * 86_400
MAX_SEMANTIC_ERROR_PERCENT = 20
MAX_CACHE_WARMING_NANO = 10**15  # a million USD
MAX_ORIGINS = 20
MAX_ORIGIN_LENGTH = 200
MAX_SLUG_LENGTH = 50


class Tenant(models.Model):
    """A customer: the unit of isolation, limits and invoices.

    A tenant that will be deleted has `purge_after`. It is not served and can be restored until then; afterwards its
    data is removed. The row itself stays, because invoices and usage refer to it.
    """

    AUDITED: ClassVar = (
        "slug",
        "name",
        "status",
        "purge_after",
        "content_retention_days",
        "unknown_parameters",
        "allowed_origins",
        "answer_cache_seconds",
        "answer_cache_sampled",
        "answer_cache_scope",
        "semantic_cache_max_error_percent",
        "cache_warming_nano",
    )

    class Status(models.TextChoices):
        ACTIVE = "active"
        SUSPENDED = "suspended"
        PURGED = "purged"

    class UnknownParameters(models.TextChoices):
        DEFAULT = "default", "platform's default"
        REJECT = "reject"
        WARN = "warn"

    class AnswerCacheScope(models.TextChoices):
        TENANT = "tenant", "all projects"
        PROJECT = "project", "keys of the same project"

    slug = models.SlugField(max_length=MAX_SLUG_LENGTH, unique=True)
    name = models.CharField(max_length=200)
    status = models.CharField(max_length=20, choices=Status, default=Status.ACTIVE)
    is_demo = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)
    purge_after = models.DateTimeField(null=True, blank=True)
    content_retention_days = models.SmallIntegerField(
        default=0, help_text="retention of prompts and completions; 0: not stored"
    )
    unknown_parameters = models.CharField(
        max_length=10,
        choices=UnknownParameters,
        default=UnknownParameters.DEFAULT,
        db_default=UnknownParameters.DEFAULT.value,
        help_text="whether unknown fields of requests are rejected, or dropped and named",
    )

    allowed_origins = models.JSONField(
        blank=True,
        default=list,
        db_default=Value([], models.JSONField()),
        help_text="origins of web pages that may call the API",
    )

    answer_cache_seconds = models.IntegerField(
        default=0, db_default=0, help_text="lifetime of cached answers; 0: answers are not cached"
    )
    answer_cache_sampled = models.BooleanField(
        default=False, db_default=False, help_text="whether answers with a temperature above 0 are cached too"
    )
    answer_cache_scope = models.CharField(
        max_length=10,
        choices=AnswerCacheScope,
        default=AnswerCacheScope.TENANT,
        db_default=AnswerCacheScope.TENANT.value,
        help_text="whether cached answers are shared by all projects, or only by the keys of a project",
    )
    semantic_cache_max_error_percent = models.SmallIntegerField(
        default=0, db_default=0, help_text="maximum error rate of answers to similar questions; 0: none are served"
    )
    cache_warming_nano = models.BigIntegerField(
        default=0, db_default=0, help_text="budget of cache warming for each day, in nano-USD; 0: caches are not warmed"
    )

    objects = TenantsManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["slug"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.CheckConstraint(
                condition=Q(status__in=["active", "suspended", "purged"]), name="tenant_status_known"
            ),
            models.CheckConstraint(
                condition=Q(content_retention_days__range=(0, MAX_CONTENT_DAYS)), name="tenant_content_retention_days"
            ),
            models.CheckConstraint(
                condition=Q(unknown_parameters__in=["default", "reject", "warn"]), name="tenant_unknown_parameters"
            ),
            models.CheckConstraint(
                condition=Q(answer_cache_seconds__range=(0, MAX_ANSWER_CACHE_SECONDS)),
                name="tenant_answer_cache_seconds",
            ),
            models.CheckConstraint(
                condition=Q(answer_cache_scope__in=["tenant", "project"]), name="tenant_answer_cache_scope"
            ),
            models.CheckConstraint(
                condition=Q(semantic_cache_max_error_percent__range=(0, MAX_SEMANTIC_ERROR_PERCENT)),
                name="tenant_semantic_cache_max_error",
            ),
            models.CheckConstraint(
                condition=Q(cache_warming_nano__range=(0, MAX_CACHE_WARMING_NANO)), name="tenant_cache_warming_nano"
            ),
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
