"""Queries that cannot forget whose rows they are about: they raise here, and see nothing in the database.

Both rest on a scope. `tenant_scope(tenant)` opens a transaction that sees that tenant's rows; `all_tenants_scope(why)`
one that sees all. Outside of both, managers raise, and row-level security shows raw SQL an empty table.
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
    """A tenant's rows were asked for without saying whose: a mistake in the code, caught before it can leak."""


@dataclass(frozen=True)
class TenantScope:
    """Whose rows may be seen: one tenant's, or everybody's for the reason `use`."""

    tenant_id: int | None
    use: BypassReason | None


_scope: ContextVar[TenantScope | None] = ContextVar("scope", default=None)


@contextmanager
def tenant_scope(tenant: Tenant | int) -> Iterator[None]:
    """Open a transaction that sees this tenant's rows and no others, also by raw SQL.

    Scopes nest; the inner one counts.
    """
    tenant_id = tenant if isinstance(tenant, int) else tenant.pk
    with _opened(TenantScope(tenant_id, None), durable=False):
        yield


@contextmanager
def all_tenants_scope(use: BypassReason, *, durable: bool = False) -> Iterator[None]:
    """Open a transaction that sees every tenant's rows. With `durable`, it must be the outermost one."""
    with _opened(TenantScope(None, use), durable=durable):
        yield


@contextmanager
def _opened(scope: TenantScope, *, durable: bool) -> Iterator[None]:
    outer = _scope.get()
    nested = connection.in_atomic_block
    token = _scope.set(scope)
    try:
        # NOTE: on a fault the transaction or savepoint is rolled back, and with it both settings; without one they end
        # with the transaction, unless another scope, or none, continues in it.
        with transaction.atomic(durable=durable):
            if scope != outer or not nested:
                _enter(scope)
            yield
            if scope != outer and nested:
                _enter(outer)
    finally:
        _scope.reset(token)


def _enter(scope: TenantScope | None) -> None:
    """Set role and tenant for this transaction."""
    role = SYSTEM if scope and scope.use else APP
    tenant = "" if scope is None or scope.tenant_id is None else str(scope.tenant_id)
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('role', %s, true), set_config('millrace.tenant', %s, true)", [role, tenant])


def current_scope() -> TenantScope | None:
    """Whose rows may be seen now; None: nobody's."""
    return _scope.get()


class TenantManager(models.Manager[M]):
    """Gives rows of one tenant, or of all inside `all_tenants_scope(…)`; anything else raises."""

    tenant_field = "tenant_id"

    def get_queryset(self) -> models.QuerySet[M]:
        raise UnscopedQueryError(f"{self.model.__name__}: use .for_tenant(tenant), or .all_tenants()")

    def for_tenant(self, tenant: Tenant | int) -> models.QuerySet[M]:
        tenant_id = tenant if isinstance(tenant, int) else tenant.pk
        _require(tenant_id, self.model.__name__)
        return super().get_queryset().filter(**{self.tenant_field: tenant_id})

    def all_tenants(self) -> models.QuerySet[M]:
        """Every tenant's rows, inside `all_tenants_scope(…)`."""
        _require(None, self.model.__name__)
        return super().get_queryset()

    def create(self, **fields: Any) -> M:
        """Create a row of the tenant named by `tenant` or `tenant_id`."""
        tenant = fields.get("tenant_id") or getattr(fields.get("tenant"), "pk", None)
        if tenant is None:
            raise UnscopedQueryError(f"{self.model.__name__}: a row belongs to a tenant")
        _require(tenant, self.model.__name__)
        return super().get_queryset().create(**fields)


def _require(tenant_id: int | None, model: str) -> None:
    """Raise unless the open scope shows this tenant's rows, or everybody's for None."""
    scope = _scope.get()
    if scope is None or (scope.use is None and (tenant_id is None or scope.tenant_id != tenant_id)):
        wanted = "system(use)" if tenant_id is None else "tenant_scope(tenant)"
        raise UnscopedQueryError(f"{model}: open `{wanted}` first")


class TenantsManager(TenantManager[M]):
    """The same for tenants themselves: one sees itself."""

    tenant_field = "pk"
