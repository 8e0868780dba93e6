"""Limits and routing policies, as people set them; the data plane reads what is compiled of them."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import F, Q

from tenants.isolation.scopes import TenantManager
from tenants.models.keys import ApiKey
from tenants.models.people import User
from tenants.models.tenancy import Project, Tenant

LIMITS = (
    "requests_per_minute",
    "input_tokens_per_minute",
    "output_tokens_per_minute",
    "tokens_per_minute",
    "requests_per_day",
    "input_tokens_per_day",
    "output_tokens_per_day",
    "tokens_per_day",
    "concurrency",
    "max_prompt_tokens",
    "max_output_tokens",
    "long_queue",
    "long_cap",
)


def _some_limit() -> Q:
    """At least one limit is set."""
    some = Q()
    for name in LIMITS:
        some |= Q(**{f"{name}__isnull": False})
    return some


def _no_negative_limit() -> Q:
    every = Q()
    for name in LIMITS:
        every &= Q(**{f"{name}__isnull": True}) | Q(**{f"{name}__gte": 0})
    return every


class LimitSet(models.Model):
    """What a tenant, one of its projects or one of its keys may use, of one model or of all together.

    A tenant limits itself; `by_operator` marks what the operator imposes, which the tenant sees and cannot change. Both
    hold. `dry_run` refuses nothing: it counts what it would have refused.
    """

    AUDITED: ClassVar = ("project_id", "key_id", "model", "by_operator", "dry_run", *LIMITS)

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, null=True)
    key = models.ForeignKey(ApiKey, on_delete=models.CASCADE, null=True)
    model = models.CharField(max_length=64, default="", blank=True)  # empty: all models together
    by_operator = models.BooleanField(default=False)
    dry_run = models.BooleanField(default=False)
    requests_per_minute = models.BigIntegerField(null=True)
    input_tokens_per_minute = models.BigIntegerField(null=True)
    output_tokens_per_minute = models.BigIntegerField(null=True)
    tokens_per_minute = models.BigIntegerField(null=True)
    requests_per_day = models.BigIntegerField(null=True)
    input_tokens_per_day = models.BigIntegerField(null=True)
    output_tokens_per_day = models.BigIntegerField(null=True)
    tokens_per_day = models.BigIntegerField(null=True)
    concurrency = models.BigIntegerField(null=True, help_text="requests at once")
    max_prompt_tokens = models.BigIntegerField(null=True)
    max_output_tokens = models.BigIntegerField(null=True)
    long_queue = models.BigIntegerField(null=True, help_text="prompts from so many tokens on are long jobs")
    long_cap = models.BigIntegerField(null=True, help_text="long jobs at once")
    updated_at = models.DateTimeField(auto_now=True)

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(
                fields=["tenant", "project", "key", "model", "by_operator", "dry_run"],
                nulls_distinct=False,
                name="limits_once_a_scope",
            ),
            models.CheckConstraint(condition=Q(project__isnull=True) | Q(key__isnull=True), name="limits_one_scope"),
            models.CheckConstraint(condition=_some_limit(), name="limits_some"),
            models.CheckConstraint(condition=_no_negative_limit(), name="limits_not_negative"),
        ]

    def __str__(self) -> str:
        return f"limits of {self.scope} of tenant {self.tenant_id}" + (f", {self.model}" if self.model else "")

    @property
    def scope(self) -> str:
        """Whom it limits: `tenant`, `project` or `key`."""
        return "key" if self.key_id else "project" if self.project_id else "tenant"


class RoutingPolicy(models.Model):
    """A version of what a logical model name of a tenant means (`tenants.routing_policies.policy`). Versions are never
    changed: a new one is published, also to go back to an old one; at most one of a name is active."""

    AUDITED: ClassVar = ("name", "version", "body", "active")

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    name = models.CharField(max_length=64)
    version = models.IntegerField()
    body = models.JSONField()
    active = models.BooleanField()
    created_at = models.DateTimeField(auto_now_add=True)
    created_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(F("tenant"), F("name"), F("version"), name="policy_version_once"),
            models.UniqueConstraint(fields=["tenant", "name"], condition=Q(active=True), name="policy_one_active"),
            models.CheckConstraint(condition=Q(version__gt=0) & ~Q(name=""), name="policy_named"),
        ]

    def __str__(self) -> str:
        return f"{self.name}, version {self.version}"
