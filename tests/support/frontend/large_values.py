"""The largest amounts and counts that a platform may reach, and tenants with many rows, for tests of all pages.

The rows are changed directly in the database, because 10,000 requests would take minutes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from psycopg import sql

if TYPE_CHECKING:
    from django.db.models import Field, Model

    from tenants.models import Tenant

DOLLARS = 10**9  # the largest amount of each column
COUNT = 10**12  # the largest count of each column
_LARGEST = {"SmallIntegerField": 2**15 - 1, "IntegerField": 2**31 - 1, "BigIntegerField": 2**63 - 1}
# The units of a column's amounts in a dollar, by a part of its name. Amounts of budgets have the names of _NANO.
_UNITS = {"femto": 10**15, "nano": 10**9, "cents": 100, "fee": 100, "subtotal": 100, "taxable": 100, "total": 100}
_NANO = re.compile(r"amount|used|reserved|limit|forecast|temporary_increase|rolled_over|rollover_limit|value|threshold")
# Columns that are neither amounts nor counts.
_OTHER = re.compile(
    r".*(_id|_at|version|number|position|digits|minutes?|weekday|days?|seconds|year|execution|attempt|attempt_count"
    r"|band|rate|priority|fencing_token|period|retry_key|ppm|micro_per_usd|arm|status|revision|flag|generation"
    r"|based_on|batch_line|offset|dimensions|block_size|percent|prompts)"
)
# Tables of which a tenant has few rows, or one for each row of another table, such as a membership for each user.
_FEW_ROWS = {
    "alerts_alertrule",
    "billing_budget",
    "billing_budgetalert",
    "billing_commitment",
    "billing_invoice",
    "billing_priceterm",
    "experiments_armtotal",
    "tenants_apikeysnapshot",
    "tenants_apikeyusage",
    "tenants_experiment",
    "tenants_limitset",
    "tenants_membership",
    "tenants_routingpolicy",
    "tenants_routingpolicydraft",
    "tenants_savedview",
    "tenants_upstreamcredential",
    "tenants_webhookattempt",
    "tenants_webhookdelivery",
    "tenants_webhookendpoint",
}
_FIRST_COPY = 100  # above the numbers of existing rows


def enlarge(tenant: Tenant) -> None:
    """Multiply every column of amounts and counts, so that its largest value is DOLLARS or COUNT.

    Of tables with a tenant, only this tenant's rows are changed. A constraint may allow less: then the largest value
    is smaller by a power of ten.
    """
    with _as_owner() as cursor:
        for model in _tables(cursor):
            for column in _numbers(model):
                _enlarge_column(cursor, model, column, tenant)
        _enlarge_costs()


def multiply(tenant: Tenant, times: int) -> None:
    """Copy one of the tenant's rows this many times in each table, except for _FEW_ROWS."""
    with _as_owner() as cursor:
        for model in _tables(cursor):
            if "tenant_id" in _columns(model) and model._meta.db_table not in _FEW_ROWS:
                _copy_row(cursor, model, tenant, times)
    with _as_owner() as cursor:
        cursor.execute("ANALYZE")  # as autovacuum does after many changes


def _tables(cursor: Any) -> list[type[Model]]:
    """Return the models of tables, without those of views."""
    from django.apps import apps  # here: Django is not set up on import

    cursor.execute("SELECT relname FROM pg_class WHERE relkind IN ('r', 'p')")
    names = {name for (name,) in cursor.fetchall()}
    return [model for model in apps.get_models() if model._meta.db_table in names]


def _columns(model: type[Model]) -> set[str]:
    return {field.column for field in model._meta.concrete_fields}


def _numbers(model: type[Model]) -> Iterator[Field[Any, Any]]:
    """Yield the columns of amounts and counts."""
    for field in model._meta.concrete_fields:
        is_number = field.get_internal_type() in (*_LARGEST, "DecimalField")
        if is_number and not (field.primary_key or field.is_relation or _OTHER.fullmatch(field.column)):
            yield field


def _enlarge_column(cursor: Any, model: type[Model], field: Field[Any, Any], tenant: Tenant) -> None:
    from django.db import IntegrityError, transaction  # here: Django is not set up on import

    kind = field.get_internal_type()
    unit = next((unit for part, unit in _UNITS.items() if part in field.column), 0)
    if kind == "DecimalField":
        unit = _UNITS["femto"]
    elif _NANO.fullmatch(field.column):
        unit = _UNITS["nano"]
    largest = min(DOLLARS * unit or COUNT, _LARGEST.get(kind, 10**38))
    only = sql.SQL("AND tenant_id = {}").format(tenant.pk) if "tenant_id" in _columns(model) else sql.SQL("")
    query = sql.SQL(
        "UPDATE {table} SET {column} = trunc({column}::numeric * {largest} / largest_now) FROM"
        " (SELECT max(abs({column}))::numeric AS largest_now FROM {table} WHERE {column} <> 0 {only}) now"
        " WHERE {column} <> 0 {only}"
    )
    table, column = sql.Identifier(model._meta.db_table), sql.Identifier(field.column)
    while largest:
        try:
            with transaction.atomic():
                cursor.execute(query.format(table=table, column=column, largest=largest, only=only))
            return
        except IntegrityError:
            largest //= 10
    raise AssertionError(f"{model._meta.db_table}.{field.column} cannot be changed")


def _enlarge_costs() -> None:
    """Enlarge the costs of experiments, and replace the prices of rate cards by the highest one."""
    from billing.currencies.amounts import MAX_NANO_PER_MILLION  # here: Django is not set up on import
    from billing.models import CompiledRateCard
    from billing.rates.pricing import Component, Rate, encode_rates
    from millrace.apps.experiments.models import ArmTotal

    for pk, moments in ArmTotal.objects.all_tenants().values_list("pk", "moments"):
        units, w, x, ww, xx, xw = moments["cost"]
        factor = DOLLARS * 10**15 // x
        moments["cost"] = [units, w, x * factor, ww, xx * factor**2, xw * factor]
        ArmTotal.objects.all_tenants().filter(pk=pk).update(moments=moments)
    rates = [Rate(number, each, MAX_NANO_PER_MILLION // number) for number, each in enumerate(Component, 1)]
    CompiledRateCard.objects.update(rates=encode_rates(tuple(rates)))


def _copy_row(cursor: Any, model: type[Model], tenant: Tenant, times: int) -> None:
    """Copy the newest row without a one-to-one relation. Times and unique values differ between the copies."""
    unique = _unique_columns(cursor, model._meta.db_table)
    copied = {}
    for field in model._meta.concrete_fields:
        if not (field.primary_key and field.get_internal_type() in ("AutoField", "BigAutoField")):
            is_own = field.column in unique and not (field.is_relation or field.choices or field.column == "tenant_id")
            copied[field.column] = _copied_value(field, is_own=is_own)
    query = sql.SQL(
        "INSERT INTO {table} ({columns}) SELECT {values} FROM"
        " (SELECT * FROM {table} WHERE tenant_id = {tenant}{alone} ORDER BY {newest} DESC LIMIT 1) original,"
        " generate_series({first}, {last}) copies(nth)"
    )
    cursor.execute(
        query.format(
            table=sql.Identifier(model._meta.db_table),
            columns=sql.SQL(", ").join(map(sql.Identifier, copied)),
            values=sql.SQL(", ").join(copied.values()),
            tenant=tenant.pk,
            alone=sql.SQL("").join(
                sql.SQL(" AND {} IS NULL").format(sql.Identifier(field.column))
                for field in model._meta.concrete_fields
                if field.one_to_one and field.null
            ),
            newest=sql.Identifier(
                next((name for name in ("id", "admitted_at") if name in _columns(model)), next(iter(copied)))
            ),
            first=_FIRST_COPY,
            last=_FIRST_COPY + times - 1,
        )
    )


def _copied_value(field: Field[Any, Any], *, is_own: bool) -> sql.Composable:
    """Return the value of a column in a copy. `is_own`: it must differ from those of other rows."""
    column, kind = sql.Identifier(field.column), field.get_internal_type()
    if kind == "DateTimeField" and field.column != "period_end":
        return sql.SQL("{} - nth * interval '1 minute'").format(column)
    if not is_own:
        return column
    if kind == "BinaryField":
        return sql.SQL("sha256(nth::text::bytea)")
    if kind == "UUIDField":
        return sql.SQL("gen_random_uuid()")
    if kind == "DateField":
        return sql.SQL("{} - nth").format(column)
    if kind in _LARGEST:
        return sql.SQL("{} + nth").format(column)
    if kind in ("CharField", "EmailField", "TextField", "SlugField"):
        return sql.SQL("left(nth || '-' || {}, {})").format(column, field.max_length or 100)
    return column


def _unique_columns(cursor: Any, table: str) -> set[str]:
    """Return the columns of the table's unique indexes. An index of an expression is one of an email address."""
    cursor.execute(
        "SELECT DISTINCT attname FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = ANY(indkey)"
        " WHERE indisunique AND indrelid = %s::regclass",
        [table],
    )
    return {name for (name,) in cursor.fetchall()} | {"email"}


@contextmanager
def _as_owner() -> Iterator[Any]:
    """Open a transaction that may change every row: as the tables' owner, without triggers and row-level security."""
    from django.db import connection  # here: Django is not set up on import

    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("SET LOCAL ROLE NONE")
        cursor.execute("SELECT oid::regclass::text FROM pg_class WHERE relforcerowsecurity AND NOT relispartition")
        secured = [name for (name,) in cursor.fetchall()]
        cursor.execute(
            "SELECT tgrelid::regclass::text, tgname FROM pg_trigger WHERE NOT tgisinternal AND tgenabled = 'O'"
        )
        triggers = cursor.fetchall()
        for table in secured:
            cursor.execute(f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY")
        for table, name in triggers:
            cursor.execute(f"ALTER TABLE {table} DISABLE TRIGGER {name}")
        yield cursor
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        for table in secured:
            cursor.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")
        for table, name in triggers:
            cursor.execute(f"ALTER TABLE {table} ENABLE TRIGGER {name}")
