"""Tenants and their projects."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q

from tenants.isolation.scopes import TenantManager, TenantsManager

MAX_CONTENT_DAYS = 90


class Tenant(models.Model):
    """A customer: the unit of isolation, of limits and of the invoice.

    One that is to be deleted has `purge_after`: it is served no more, can be restored, and is emptied after that time.
    The row itself stays, since bills and usage name it.
    """

    AUDITED: ClassVar = ("slug", "name", "status", "purge_after", "keep_content_days")

    class Status(models.TextChoices):
        ACTIVE = "active"
        SUSPENDED = "suspended"
        PURGED = "purged"

    slug = models.SlugField(max_length=50, unique=True)
    name = models.CharField(max_length=200)
    status = models.CharField(max_length=20, choices=Status, default=Status.ACTIVE)
    is_demo = models.BooleanField(default=False)
    created_at = models.DateTimeField(auto_now_add=True)
    purge_after = models.DateTimeField(null=True, blank=True)
    keep_content_days = models.SmallIntegerField(default=0, help_text="how long prompts and answers are kept; 0: not")

    objects = TenantsManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["slug"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.CheckConstraint(
                condition=Q(status__in=["active", "suspended", "purged"]), name="tenant_status_known"
            ),
            models.CheckConstraint(
                condition=Q(keep_content_days__range=(0, MAX_CONTENT_DAYS)), name="tenant_content_days"
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def is_suspended(self) -> bool:
        """Whether it is not served: suspended, or on its way out."""
        return self.status != self.Status.ACTIVE or self.purge_after is not None


class Project(models.Model):
    """A part of a tenant's work, with keys of its own."""

    AUDITED: ClassVar = ("slug", "name")

    tenant = models.ForeignKey(Tenant, on_delete=models.PROTECT)
    slug = models.SlugField(max_length=50)
    name = models.CharField(max_length=200)
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["slug"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["tenant", "slug"], name="project_slug_once_a_tenant"),
            models.UniqueConstraint(fields=["id", "tenant"], name="project_of_tenant"),  # what keys and limits refer to
        ]

    def __str__(self) -> str:
        return self.name
