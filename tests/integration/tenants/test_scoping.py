"""Tenant scoping: rows cannot be queried without a tenant, by managers or by raw SQL."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from django.apps import apps
from django.db import DatabaseError, connection, transaction
from psycopg.sql import SQL, Composed, Identifier

from tenants.actions import do_create_api_key, do_create_project, do_create_tenant
from tenants.isolation.db_roles import APP, SYSTEM, BypassReason
from tenants.isolation.scopes import TenantManager, UnscopedQueryError, all_tenants_scope, tenant_scope
from tenants.models import ApiKey, Membership, Project, Tenant, User
from tests.support.rows import only_project

pytestmark = [pytest.mark.django_db, pytest.mark.acme(roles=["owner"])]
SCOPED = [model for model in apps.get_models() if isinstance(model._default_manager, TenantManager)]


def ask(sql: str | Composed, *parameters: object) -> list[tuple]:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return cursor.fetchall()


def has_scope(tenant: Tenant) -> bool:
    """Return whether queries of the tenant's rows are allowed, without running one."""
    try:
        Project.objects.for_tenant(tenant)
    except UnscopedQueryError:
        return False
    return True


@pytest.fixture
def other() -> Tenant:
    other = do_create_tenant("other", "Other", owner=User.objects.create_user("owner@other.example"))
    do_create_api_key(only_project(other), "theirs")
    return other


def test_the_tests_role_cannot_bypass_row_level_security():
    (row,) = ask(
        "SELECT rolname, rolsuper, rolbypassrls, rolcreaterole, rolcreatedb FROM pg_roles WHERE rolname = current_user"
    )
    assert row == (APP, False, False, False, False)
    owned = "SELECT count(*) FROM pg_class WHERE relowner = (SELECT oid FROM pg_roles WHERE rolname = current_user)"
    assert ask(owned) == [(0,)]


def test_scoped_queries_return_the_tenants_rows(acme):
    do_create_project(acme, "second", "Second")
    with tenant_scope(acme):
        assert [project.slug for project in Project.objects.for_tenant(acme)] == ["default", "second"]
        assert Project.objects.for_tenant(acme.pk).count() == 2


def test_other_tenants_rows_are_not_returned(acme, other):
    theirs = only_project(other)
    with tenant_scope(acme):
        assert not Project.objects.for_tenant(acme).filter(pk=theirs.pk).exists()
        with pytest.raises(UnscopedQueryError):
            Project.objects.for_tenant(other)
    with all_tenants_scope(BypassReason.COMMAND):
        assert Project.objects.all_tenants().count() == 2
        assert Project.objects.for_tenant(other).get() == theirs


@pytest.mark.parametrize("model", SCOPED)
@pytest.mark.parametrize("ask", ["all", "get", "first", "count", "exists"])
def test_unscoped_queries_raise(model, ask):
    with pytest.raises(UnscopedQueryError):
        getattr(model.objects, ask)()


def test_all_tenants_scope_requires_a_reason(acme):
    with pytest.raises(UnscopedQueryError):
        Project.objects.all_tenants()
    with tenant_scope(acme), pytest.raises(UnscopedQueryError):
        Project.objects.all_tenants()


def test_a_row_belongs_to_a_tenant(acme, other):
    with tenant_scope(acme):
        with pytest.raises(UnscopedQueryError):
            Project.objects.create(slug="stray", name="Stray")
        with pytest.raises(UnscopedQueryError):
            Project.objects.create(tenant=other, slug="stray", name="Stray")


# Every table with tenants' rows, of any app, is found in the database, so that none is missing.


def tables() -> Iterator[str]:
    for (name,) in ask(
        "SELECT DISTINCT c.table_name FROM information_schema.columns c JOIN pg_class t ON t.relname = c.table_name"
        " WHERE c.table_schema = current_schema() AND c.column_name = 'tenant_id' AND t.relkind IN ('r', 'p')"
    ):
        yield name


PRICES = {"billing_price", "billing_compiledratecard"}  # global rows have no tenant
OPERATORS = {"billing_priceversion", "operations_healthevent"}  # the app's role has no right to read it


def test_every_table_of_tenants_rows_is_protected():
    found = {"tenants_tenant", *tables()}
    assert {model._meta.db_table for model in SCOPED if model._meta.managed} <= found  # the others are views of these
    assert any(name.startswith("billing_usageevent_20") for name in found)
    for name in found:
        (row,) = ask("SELECT relrowsecurity, relforcerowsecurity FROM pg_class WHERE oid = to_regclass(%s)", name)
        assert row == (True, True), name
        column = "id" if name == "tenants_tenant" else "tenant_id"
        policies = ask("SELECT qual, with_check, roles::text FROM pg_policies WHERE tablename = %s", name)
        setting = "(NULLIF(current_setting('millrace.tenant'::text, true), ''::text))::bigint"
        if name in OPERATORS:
            assert not ask("SELECT 1 WHERE has_table_privilege(%s, %s, 'SELECT')", APP, name)
            assert not policies
            continue
        wanted = f"({column} = {setting})"
        for qual, check, roles in policies:
            assert qual == (f"((tenant_id IS NULL) OR {wanted})" if name in PRICES else wanted), name
            assert check in (qual, None), name  # None: as for reading
            assert roles == "{public}"
        assert len(policies) == 1, name


def test_a_query_without_a_filter_returns_no_rows_of_other_tenants(acme, other, event):
    from billing.metering.ingest import UsageMessage, settle
    from inference_worker.contract.messages import encode

    settle(
        [UsageMessage("1-0", encode(event(tenant_id=other.pk))), UsageMessage("2-0", encode(event(tenant_id=acme.pk)))]
    )
    filled = set()
    for name in {"tenants_tenant", *tables()} - OPERATORS:
        column = "id" if name == "tenants_tenant" else "tenant_id"
        select = SQL("SELECT DISTINCT {} FROM {}").format(Identifier(column), Identifier(name))
        assert ask(select) == [], name
        with tenant_scope(acme):
            assert {tenant for (tenant,) in ask(select)} <= {acme.pk}, name
        with all_tenants_scope(BypassReason.COMMAND):
            if len(ask(select)) == 2:
                filled.add(name)
    assert {"tenants_tenant", "tenants_project", "tenants_membership", "tenants_auditentry"} < filled
    assert "billing_usageevent" in filled
    with tenant_scope(acme):
        for model in (Tenant, Project, Membership, ApiKey):
            rows = model._base_manager.all()  # a plain, unscoped queryset
            assert {getattr(row, "tenant_id", row.pk) for row in rows} <= {acme.pk}


def test_rows_of_other_tenants_cannot_be_changed_or_created(acme, other):
    project = only_project(other)
    with tenant_scope(acme):
        assert Project._base_manager.filter(pk=project.pk).update(name="Mine") == 0
        assert Project._base_manager.filter(pk=project.pk).delete()[0] == 0
        for sql in (
            "INSERT INTO tenants_project (tenant_id, slug, name, created_at) VALUES (%s, 'x', 'x', now())",
            "UPDATE tenants_project SET tenant_id = %s",
        ):
            with pytest.raises(DatabaseError, match="row-level security"), transaction.atomic():
                connection.cursor().execute(sql, [other.pk])


def test_a_keys_project_must_belong_to_its_tenant(acme, other):
    key, _ = do_create_api_key(only_project(acme), "k")
    theirs = only_project(other)
    with pytest.raises(DatabaseError, match="project_id_of_tenant"), all_tenants_scope(BypassReason.COMMAND):
        connection.cursor().execute("UPDATE tenants_apikey SET project_id = %s WHERE id = %s", [theirs.pk, key.pk])


def roles() -> tuple[str, str]:
    return ask("SELECT current_user::text, current_setting('millrace.tenant', true)")[0]


def test_scopes_nest_and_end(acme, other):
    assert roles() in [(APP, None), (APP, "")]
    with tenant_scope(acme):
        assert roles() == (APP, str(acme.pk))
        with all_tenants_scope(BypassReason.COMMAND):
            assert roles() == (SYSTEM, "")
            with tenant_scope(other):
                assert roles() == (APP, str(other.pk))
            assert roles() == (SYSTEM, "")
        assert roles() == (APP, str(acme.pk))
        with pytest.raises(RuntimeError), all_tenants_scope(BypassReason.COMMAND):
            raise RuntimeError("undone")
        assert roles() == (APP, str(acme.pk))
    assert roles() == (APP, "")
    assert not has_scope(acme)


@pytest.mark.django_db(transaction=True)
def test_scopes_end_with_their_transaction(acme):
    with tenant_scope(acme):
        pass
    assert roles() in [(APP, None), (APP, "")]
    with pytest.raises(RuntimeError), all_tenants_scope(BypassReason.COMMAND):
        raise RuntimeError("undone")
    assert roles() in [(APP, None), (APP, "")]
    with (
        pytest.raises(RuntimeError, match="durable"),
        transaction.atomic(),
        all_tenants_scope(BypassReason.COMMAND, durable=True),
    ):
        pass
    assert not has_scope(acme)


def test_a_scope_belongs_to_its_thread(acme):
    found = []
    with tenant_scope(acme):
        assert has_scope(acme)
        thread = threading.Thread(target=lambda: found.append(has_scope(acme)))
        thread.start()
        thread.join()
    assert found == [False]
