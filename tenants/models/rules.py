"""Rate limits and routing policies. Gateways read them from compiled key snapshots."""

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
    "long_prompt_threshold",
    "long_prompt_concurrency",
)


def _has_limit() -> Q:
    condition = Q()
    for name in LIMITS:
        condition |= Q(**{f"{name}__isnull": False})
    return condition


def _no_negative_limit() -> Q:
    condition = Q()
    for name in LIMITS:
        condition &= Q(**{f"{name}__isnull": True}) | Q(**{f"{name}__gte": 0})
    return condition


class LimitSet(models.Model):
    """Rate limits of a tenant, a project or a key, for one model or for all models together.

    Operators' limits have `set_by_operator`; the tenant sees them and cannot change them. They apply in addition to the
    tenant's limits. Limits with `dry_run` reject nothing; the requests that they would have rejected are counted.
    """

    AUDITED: ClassVar = ("project_id", "key_id", "model", "set_by_operator", "dry_run", *LIMITS)

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    project = models.ForeignKey(Project, on_delete=models.CASCADE, null=True)
    key = models.ForeignKey(ApiKey, on_delete=models.CASCADE, null=True)
    model = models.CharField(max_length=64, default="", blank=True)  # empty: all models
    set_by_operator = models.BooleanField(default=False)
    dry_run = models.BooleanField(default=False)
    requests_per_minute = models.BigIntegerField(null=True)
    input_tokens_per_minute = models.BigIntegerField(null=True)
    output_tokens_per_minute = models.BigIntegerField(null=True)
    tokens_per_minute = models.BigIntegerField(null=True)
    requests_per_day = models.BigIntegerField(null=True)
    input_tokens_per_day = models.BigIntegerField(null=True)
    output_tokens_per_day = models.BigIntegerField(null=True)
    tokens_per_day = models.BigIntegerField(null=True)
    concurrency = models.BigIntegerField(null=True, help_text="concurrent requests")
    max_prompt_tokens = models.BigIntegerField(null=True)
    max_output_tokens = models.BigIntegerField(null=True)
    long_prompt_threshold = models.BigIntegerField(null=True, help_text="tokens from which a prompt is long")
    long_prompt_concurrency = models.BigIntegerField(null=True, help_text="concurrent requests with long prompts")
    updated_at = models.DateTimeField(auto_now=True)

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(
                fields=["tenant", "project", "key", "model", "set_by_operator", "dry_run"],
                nulls_distinct=False,
                name="limits_unique_scope",
            ),
            models.CheckConstraint(condition=Q(project__isnull=True) | Q(key__isnull=True), name="limits_one_scope"),
            models.CheckConstraint(condition=_has_limit(), name="limits_not_empty"),
            models.CheckConstraint(condition=_no_negative_limit(), name="limits_not_negative"),
        ]

    def __str__(self) -> str:
        owner = self.key_id or self.project_id or self.tenant_id
        return f"{self.scope} {owner}" + (f", {self.model}" if self.model else "")

    @property
    def scope(self) -> str:
        """The level of the limits: `tenant`, `project` or `key`."""
        return "key" if self.key_id else "project" if self.project_id else "tenant"


class RoutingPolicy(models.Model):
    """A version of the policy of a tenant's model name (`tenants.routing_policies.policy`).

    Versions never change. Every change, including a rollback, publishes a new version. At most one version of a name is
    active.
    """

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
            models.UniqueConstraint(F("tenant"), F("name"), F("version"), name="policy_version_unique"),
            models.UniqueConstraint(fields=["tenant", "name"], condition=Q(active=True), name="policy_one_active"),
            models.CheckConstraint(condition=Q(version__gt=0) & ~Q(name=""), name="policy_named"),
        ]

    def __str__(self) -> str:
        return f"{self.name}, version {self.version}"


class RoutingPolicyDraft(models.Model):
    """The draft of a routing policy. A name has at most one. Requests do not use it until it is published.

    `based_on` is the active version that the draft was made from; None if there was none. A draft may be invalid.
    """

    AUDITED: ClassVar = ("name", "body", "based_on")

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    name = models.CharField(max_length=64)
    body = models.JSONField()
    based_on = models.IntegerField(null=True, help_text="version that was active when the draft was created")
    updated_at = models.DateTimeField(auto_now=True)
    updated_by = models.ForeignKey(User, on_delete=models.SET_NULL, null=True, related_name="+")

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["-id"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["tenant", "name"], name="policy_draft_unique"),
            models.CheckConstraint(condition=~Q(name=""), name="policy_draft_named"),
        ]

    def __str__(self) -> str:
        return self.name
