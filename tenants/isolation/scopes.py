"""Tenant-scoped queries. Unscoped access raises in Python and returns no rows in PostgreSQL.

`tenant_scope(tenant)` opens a transaction that sees the rows of one tenant, `all_tenants_scope(reason)` one that sees
all rows. Without a scope, managers raise an error, and raw SQL sees empty tables by row-level security.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import connection, models, transaction

from tenants.isolation.db_roles import APP, SYSTEM, BypassReason

if TYPE_CHECKING:
    from tenants.models import Tenant

M = TypeVar("M", bound=models.Model)


class UnscopedQueryError(Exception):
    """An error of a query for tenants' rows without a matching scope."""


@dataclass(frozen=True)
class TenantScope:
    """The rows that a transaction may see: those of a tenant, or all rows for `bypass_reason`."""

    tenant_id: int | None
    bypass_reason: BypassReason | None


_scope: ContextVar[TenantScope | None] = ContextVar("scope", default=None)


@contextmanager
def tenant_scope(tenant: Tenant | int) -> Iterator[None]:
    """Open a transaction that sees only this tenant's rows, also in raw SQL.

    Scopes can be nested; the innermost one applies.
    """
    tenant_id = tenant if isinstance(tenant, int) else tenant.pk
    with _open_scope(TenantScope(tenant_id, None), durable=False):
        yield


@contextmanager
def all_tenants_scope(reason: BypassReason, *, durable: bool = False) -> Iterator[None]:
    """Open a transaction that sees the rows of all tenants. With `durable`, it must be the outermost transaction."""
    with _open_scope(TenantScope(None, reason), durable=durable):
        yield


@contextmanager
def _open_scope(scope: TenantScope, *, durable: bool) -> Iterator[None]:
    outer = _scope.get()
    nested = connection.in_atomic_block
    token = _scope.set(scope)
    try:
        # NOTE: an error rolls both settings back with the transaction or savepoint. Otherwise they end with the
        # transaction, and are reset here if an outer scope or transaction continues.
        with transaction.atomic(durable=durable):
            if scope != outer or not nested:
                _enter(scope)
            yield
            if scope != outer and nested:
                _enter(outer)
    finally:
        _scope.reset(token)


def _enter(scope: TenantScope | None) -> None:
    """Set the database role and the tenant for the transaction."""
    role = SYSTEM if scope and scope.bypass_reason else APP
    tenant = "" if scope is None or scope.tenant_id is None else str(scope.tenant_id)
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('role', %s, true), set_config('millrace.tenant', %s, true)", [role, tenant])


def release_connection() -> None:
    """Return the connection to its pool before work that needs no database. A transaction keeps its connection."""
    if not connection.in_atomic_block:
        connection.close()


class TenantManager(models.Manager[M]):
    """A manager of tenants' rows. Queries must name a tenant, or all tenants inside `all_tenants_scope(…)`."""

    tenant_field = "tenant_id"

    def get_queryset(self) -> models.QuerySet[M]:
        raise UnscopedQueryError(f"{self.model.__name__}: use .for_tenant(tenant), or .all_tenants()")

    def for_tenant(self, tenant: Tenant | int) -> models.QuerySet[M]:
        tenant_id = tenant if isinstance(tenant, int) else tenant.pk
        _require(tenant_id, self.model.__name__)
        return super().get_queryset().filter(**{self.tenant_field: tenant_id})

    def all_tenants(self) -> models.QuerySet[M]:
        """Return the rows of all tenants, inside `all_tenants_scope(…)`."""
        _require(None, self.model.__name__)
        return super().get_queryset()

    def create(self, **fields: Any) -> M:
        """Create a row of the tenant given by `tenant` or `tenant_id`."""
        tenant = fields.get("tenant_id") or getattr(fields.get("tenant"), "pk", None)
        if tenant is None:
            raise UnscopedQueryError(f"{self.model.__name__}: a row belongs to a tenant")
        _require(tenant, self.model.__name__)
        return super().get_queryset().create(**fields)


def is_visible(tenant_id: int | None) -> bool:
    """Return whether the open scope sees this tenant's rows, or all rows if `tenant_id` is None."""
    scope = _scope.get()
    if scope is None:
        return False
    return scope.bypass_reason is not None or (tenant_id is not None and scope.tenant_id == tenant_id)


def _require(tenant_id: int | None, model: str) -> None:
    """Require that the open scope sees this tenant's rows, or all rows if `tenant_id` is None."""
    if not is_visible(tenant_id):
        wanted = "all_tenants_scope(reason)" if tenant_id is None else "tenant_scope(tenant)"
        raise UnscopedQueryError(f"{model}: open `{wanted}` first")


class TenantsManager(TenantManager[M]):
    """The manager of tenants. A tenant's scope sees the tenant's own row."""

    tenant_field = "pk"
