"""The server time of each screen of the console on a large database: `python -m benchmarks.console`.

It starts a separate PostgreSQL and Valkey in a temporary directory, and fills them with tenants, API keys and 31 days
of settled requests, always the same. The measured tenant has a tenth of the keys and of the requests. Then it requests
each screen through all middleware, and each part that a screen loads afterwards, and prints one table.

With `--rollups`, it writes the rollups of this many requests of 62 days directly, and no requests, for the screens of
sums. Hours are written for the last two days, which are the only ones that screens read by hour.

With `--data`, the filled database is kept in a directory, and used again by the next run with this directory.
"""

from __future__ import annotations

import argparse
import gc
import math
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks.options import parse
from benchmarks.services import start_services

SQL = Path(__file__).parent / "sql"
TARGET_MS = 150
DAYS = 31
_ROLLUPS = ("rollups", "end_user_rollups", "rollup_state")
_TABLES = ("requests", "usage_events", "feedback", "costs", "daily_costs")  # in the order of their statements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests of 31 days (default 1,000,000)")
    parser.add_argument("--rollups", type=int, default=0, help="write only the rollups of this many requests")
    parser.add_argument("--keys", type=int, default=10_000, help="API keys (default 10,000)")
    parser.add_argument("--tenants", type=int, default=1000, help="tenants (default 1,000)")
    parser.add_argument("--times", type=int, default=20, help="measured requests of each screen (default 20)")
    parser.add_argument("--only", default="", help="only screens with this text in their name")
    parser.add_argument("--data", type=Path, help="a directory that keeps the filled database for the next run")
    parser.add_argument("--slow-ms", type=float, help="print the statements of each screen that take longer")
    options = parse(parser, {"requests": 1000, "keys": 60, "tenants": 6, "times": 1})
    with ExitStack() as running:
        began = time.perf_counter()
        start_services(running, options.data)
        with _indexes_built_later() if options.rollups and not _is_filled() else nullcontext():
            tenant = _first_tenant() if _is_filled() else _fill(options)
        _analyze() if options.rollups else _roll_up()
        count, took = options.rollups or options.requests, time.perf_counter() - began
        sizes = f"{options.keys:,} keys, {options.tenants:,} tenants"
        print(f"{count:,} requests, {sizes}, filled in {took:.0f} s", flush=True)
        slow = _measure(tenant, options)
    print(f"{slow} above {TARGET_MS} ms" if slow else f"all within {TARGET_MS} ms")


def _is_filled() -> bool:
    from tenants.models import User

    return User.objects.filter(email="operator@example.com").exists()  # created last


def _roll_up() -> None:
    """Update the rollups, as the jobs of the platform do."""
    from billing.metering import rollups
    from billing.metering.end_users import build_end_users
    from millrace.apps.request_log import request_rollups

    began = time.perf_counter()
    rollups.build()
    build_end_users()
    request_rollups.build(wait=timedelta(0))
    print(f"rollups in {time.perf_counter() - began:.0f} s", flush=True)
    _analyze()


def _analyze() -> None:
    from django.db import connections

    with connections["owner"].cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")  # as autovacuum does after inserts


@contextmanager
def _indexes_built_later() -> Iterator[None]:
    """Drop the indexes of the rollups, and create them again at the end, which takes less time than to update them."""
    from django.db import connections

    from billing.models import EndUserRollup, UsageRollup

    models: tuple[Any, ...] = (UsageRollup, EndUserRollup)
    with connections["owner"].schema_editor() as editor:
        for model in models:
            for index in model._meta.indexes:
                editor.remove_index(model, index)
            for constraint in model._meta.constraints:
                editor.remove_constraint(model, constraint)
    yield
    began = time.perf_counter()
    with connections["owner"].schema_editor() as editor:
        for model in models:
            for constraint in model._meta.constraints:
                editor.add_constraint(model, constraint)
            for index in model._meta.indexes:
                editor.add_index(model, index)
    print(f"indexes in {time.perf_counter() - began:.0f} s", flush=True)


def _midnight(now: datetime) -> datetime:
    return now.replace(hour=0, minute=0, second=0, microsecond=0)


def _first_tenant() -> Any:
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope
    from tenants.models import Tenant

    with all_tenants_scope(BypassReason.COMMAND):
        return Tenant.objects.all_tenants().order_by("pk")[0]


def _fill(options: argparse.Namespace) -> Any:
    """Create the rows and return the measured tenant. The platform's own actions create what is few."""
    from django.db import connection

    from billing.budgets.budgets import do_make_budget
    from tenants import actions
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope
    from tenants.models import ApiKey, Project, Tenant, User

    now = datetime.now(UTC)
    big, small = options.keys // 10, max(1, (options.keys - options.keys // 10) // (options.tenants - 1))
    owner = User.objects.create_user("owner@example.com", "a long password")  # needed to confirm an identity
    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        rows = [Tenant(slug=f"tenant-{number}", name=f"Tenant {number}") for number in range(options.tenants)]
        tenants = Tenant.objects.all_tenants().bulk_create(rows, batch_size=1000)
        projects = Project.objects.all_tenants().bulk_create(
            [Project(tenant=tenant, slug="default", name="Default") for tenant in tenants], batch_size=1000
        )
        keys = [
            ApiKey(
                tenant=project.tenant,
                project=project,
                name=f"Key {number}",
                prefix=f"sk-mr-{number:06}",
                key_hash=f"{project.pk}.{number}".encode().ljust(32, b"."),
                scopes=["inference", "models"],
            )
            for project, many in zip(projects, [big, *[small] * (len(projects) - 1)], strict=True)
            for number in range(many)
        ]
        made = ApiKey.objects.all_tenants().bulk_create(keys, batch_size=1000)
        months = sorted({(now - timedelta(days=ago)).date().replace(day=1) for ago in range(DAYS + 1)})
        cursor.execute("SELECT billing_create_partitions(%s)", [months])
        values = {
            "end": now,
            "span": timedelta(days=DAYS),
            "requests": options.requests,
            "tenants": options.tenants,
            "tenant_ids": [tenant.pk for tenant in tenants],
            "project_ids": [project.pk for project in projects],
            "first_keys": [made[0].pk, *(made[big + small * number].pk for number in range(len(tenants) - 1))],
            "models": ["llama-70b", "qwen-8b", "smollm2-135m"],
            "big": big,
            "small": small,
        }
        if options.rollups:
            values |= {"requests": options.rollups, "keys": [key.pk for key in made], "end": _midnight(now)}
            cursor.execute("SET LOCAL work_mem = '256MB'")
        for table in _ROLLUPS if options.rollups else _TABLES:
            began = time.perf_counter()
            statement = (SQL / f"{table}.sql").read_text(encoding="utf-8")
            cursor.execute(statement, values if table == "requests" or options.rollups else None)
            print(f"{table} in {time.perf_counter() - began:.0f} s", flush=True)
    measured = tenants[0]
    actions.do_add_member(measured, owner, "owner")
    actions.do_invite(measured, "guest@example.com", "developer")
    do_make_budget(measured, name="All of it", unit="money", period="month", amount=10**15)
    User.objects.create_superuser("operator@example.com")
    return measured


def _screens(tenant: Any, only: str) -> Iterator[tuple[Any, str]]:
    """Yield each screen that exists in this database, with its path."""
    from django.core.exceptions import ObjectDoesNotExist

    from tenants.actions import ActionRefused
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope, tenant_scope
    from tests.support.frontend.console import DEMO, load_screens

    for screen in load_screens():
        if only not in screen.name:
            continue
        names = set(re.findall(r"{(\w+)}", screen.url)) - {"slug"}
        is_operator = screen.who == "operator"
        try:
            with all_tenants_scope(BypassReason.OPERATOR) if is_operator else tenant_scope(tenant):
                values = {name: DEMO[name](tenant) for name in names}
        except (LookupError, AttributeError, TypeError, ObjectDoesNotExist, ActionRefused):
            continue
        yield screen, screen.url.format(slug=tenant.slug, **values)


def _measure(tenant: Any, options: argparse.Namespace) -> int:
    """Print the times of each screen, and return how many have a 95th percentile above the target."""
    from millrace.gateway.app import GC_THRESHOLD
    from tenants.models import User
    from tests.support.frontend.console import client_of, shown_at

    gc.collect()  # as the gateway does after its start, which serves the console
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    owner, operator = (User.objects.get(email=f"{who}@example.com") for who in ("owner", "operator"))
    clients: dict[str, Any] = {}
    slow = 0
    print(f"{'screen':44} {'p50':>8} {'p95':>8}")
    for screen, path in _screens(tenant, options.only):
        if screen.who not in clients:
            clients[screen.who] = client_of(screen.who, owner, operator)
        with shown_at(screen.public_url):
            slow += _measure_screen(clients[screen.who], screen, path, options)
    return slow


def _measure_screen(client: Any, screen: Any, path: str, options: argparse.Namespace) -> int:
    """Print the times of a screen and of its parts. Return how many have a 95th percentile above the target."""
    name, slow = screen.name, 0
    page = client.get(path)
    if page.status_code == 302 and not screen.has_layout:  # from a link in an email to its form
        path = page.url
        page = client.get(path)
    if page.status_code == 404:  # the screen of an object that this database lacks
        return 0
    if page.status_code != 200 or b'class="panel-error"' in page.content:
        raise SystemExit(f"{name}: status {page.status_code} or a panel that failed: {path}")
    lazy = re.findall(r'id="panel-([\w-]+)" hx-get="([^"]+)" hx-trigger="load', page.content.decode())
    parts = [(name, path), *((f"{name}: {part}, afterwards", url.replace("&amp;", "&")) for part, url in lazy)]
    for label, url in parts:
        times = sorted(_time(client, url) for _ in range(options.times))
        p50, p95 = times[len(times) // 2], times[max(0, math.ceil(0.95 * len(times)) - 1)]
        slow += p95 > TARGET_MS
        print(f"{label:44} {p50:5.0f} ms {p95:5.0f} ms{' *' if p95 > TARGET_MS else ''}", flush=True)
        if options.slow_ms is not None:
            _print_statements(client, url, options.slow_ms)
    return slow


def _print_statements(client: Any, url: str, slow_ms: float) -> None:
    """Request a page once more, and print its slow statements."""
    from django.db import connection

    taken: list[tuple[float, str]] = []

    def measure(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        began = time.perf_counter()
        try:
            return execute(sql, params, many, context)
        finally:
            taken.append((1000 * (time.perf_counter() - began), " ".join(sql.split())))

    with connection.execute_wrapper(measure):
        _time(client, url)
    print(f"  {len(taken)} statements, {sum(ms for ms, _ in taken):.0f} ms")
    for ms, sql in sorted(taken, reverse=True):
        if ms >= slow_ms:
            print(f"  {ms:6.0f} ms  {sql[:240]}", flush=True)


def _time(client: Any, url: str) -> float:
    began = time.perf_counter()
    response = client.get(url)
    assert response.status_code == 200, url
    return 1000 * (time.perf_counter() - began)


if __name__ == "__main__":
    main()
