"""Access to tenants' rows for tests, which run as the app's database role and see no rows without a scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenants.models import Project, Tenant


class _UnscopedRows:
    """A manager of a model's rows of all tenants. A method that returns a queryset returns a list here."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Callable[..., Any]:
        from django.db.models import QuerySet  # here: imported before Django is set up

        from tenants.isolation.db_roles import BypassReason
        from tenants.isolation.scopes import all_tenants_scope

        def query(*args: Any, **fields: Any) -> Any:
            with all_tenants_scope(BypassReason.COMMAND):
                result = getattr(self._model._base_manager, name)(*args, **fields)
                return list(result) if isinstance(result, QuerySet) else result

        return query


def unscoped(model: Any) -> _UnscopedRows:
    """Return the model's rows of all tenants: `unscoped(ApiKey).count()`."""
    return _UnscopedRows(model)


def allow_emptying(cursor: Any) -> None:
    """Let the tests' role empty every table, as Django does after a test that committed. Run it as the owner."""
    from tenants.isolation.db_roles import APP

    cursor.execute(f"GRANT TRUNCATE ON ALL TABLES IN SCHEMA public TO {APP}")
    cursor.execute(
        "SELECT tgrelid::regclass::text, tgname FROM pg_trigger"
        " WHERE right(tgname, 12) = '_no_truncate' AND tgname <> 'billing_usage_no_truncate'"
    )
    for table, trigger in cursor.fetchall():
        cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER {trigger}")


def of(model: Any, tenant: Tenant, **fields: Any) -> list[Any]:
    """Return the tenant's rows of this model, in their order."""
    from tenants.isolation.scopes import tenant_scope

    with tenant_scope(tenant):
        return list(model.objects.for_tenant(tenant).filter(**fields))


def only_project(tenant: Tenant) -> Project:
    from tenants.models import Project

    (project,) = of(Project, tenant)
    project.tenant = tenant
    return project
