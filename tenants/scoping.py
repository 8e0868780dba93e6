"""Queries that cannot forget whose rows they are about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from django.db import models

if TYPE_CHECKING:
    from tenants.models import Tenant

M = TypeVar("M", bound=models.Model)


class UnscopedQueryError(Exception):
    """A tenant's rows were asked for without saying whose: a mistake in the code, caught before it can leak."""


class TenantManager(models.Manager[M]):
    """Gives rows of one tenant, or of all for a stated reason; anything else raises."""

    def get_queryset(self) -> models.QuerySet[M]:
        raise UnscopedQueryError(f"{self.model.__name__}: use .for_tenant(tenant), or .all_tenants(reason)")

    def for_tenant(self, tenant: Tenant | int) -> models.QuerySet[M]:
        tenant_id = tenant if isinstance(tenant, int) else tenant.pk
        return super().get_queryset().filter(tenant_id=tenant_id)

    def all_tenants(self, reason: str) -> models.QuerySet[M]:
        """Every tenant's rows. `reason` is for the reader of the code."""
        if not reason:
            raise UnscopedQueryError("say why all tenants' rows are needed")
        return super().get_queryset()

    def create(self, **fields: Any) -> M:
        if "tenant" not in fields and "tenant_id" not in fields:
            raise UnscopedQueryError(f"{self.model.__name__}: a row belongs to a tenant")
        return super().get_queryset().create(**fields)
