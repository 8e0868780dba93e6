"""The server time of each screen of the console on a large database: `python -m benchmarks.console`.

It starts a separate PostgreSQL and Valkey in a temporary directory, and fills them with tenants, API keys and 31 days
of settled requests, always the same. The measured tenant has a tenth of the keys and of the requests. Then it requests
each screen through all middleware, and each part that a screen loads afterwards, and prints one table.

With `--data`, the filled database is kept in a directory, and used again by the next run with this directory.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [path for path in (str(ROOT), str(ROOT / "platform")) if path not in sys.path]

from benchmarks.options import parse  # noqa: E402  (after the path it needs)
from millrace.local.postgres import Postgres  # noqa: E402
from millrace.local.valkey import Valkey  # noqa: E402

TARGET_MS = 150
DAYS = 31
# Request n belongs to the measured tenant for every tenth n, otherwise to tenant n modulo their number. Its hash h
# decides the other properties. A hit of the answer cache returns the answer of an older request of the same tenant.
_RECORDS = """
INSERT INTO request_log_requestrecord (tenant_id, started_at, request_id, project_id, key_id, gateway_id, endpoint,
    requested_model, served_model, stream, status, code, outcome, limited_by, limits, budget_periods, route, placements,
    prompts, prompt_tokens, total_ms, ttft_ms, dry_run_rejections, replay_of, cache_layer, cache_source, end_user,
    retry_key)
SELECT (%(tenant_ids)s::bigint[])[1 + tenant], at, 'req_' || md5(n::text), (%(project_ids)s::bigint[])[1 + tenant],
    (%(first_keys)s::bigint[])[1 + tenant] + (n / 10) %% CASE WHEN tenant = 0 THEN %(big)s ELSE %(small)s END, 'gw-1',
    'chat.completions', model, model, true,
    CASE outcome WHEN 'limited' THEN '429' WHEN 'failed' THEN '500' ELSE '200' END,
    CASE outcome WHEN 'limited' THEN 'rate_limit_exceeded' WHEN 'failed' THEN 'internal_error' ELSE '' END, outcome,
    CASE outcome WHEN 'limited' THEN jsonb_build_object('kind', 'limit', 'scope', 'tenant', 'id', tenant, 'model', '',
        'name', CASE h %% 2 WHEN 0 THEN 'requests_per_minute' ELSE 'input_tokens_per_minute' END) END,
    '[]', '[]', CASE WHEN layer IN ('prefix', 'computed') THEN '{"answer_cache": {"miss": "not_cached"}}' ELSE '{}'
        END::jsonb || CASE WHEN h %% 10 < 3 THEN '{"policy": {"version": 3}}' ELSE '{}' END::jsonb, '[]',
    1, 100 + h %% 4000, ttft + h %% 9000, ttft, 0, '', layer,
    CASE WHEN layer IN ('exact', 'semantic') THEN 'req_' || md5((n + 10 * (%(tenants)s - 1))::text) ELSE '' END,
    CASE WHEN h %% 2 = 0 THEN 'user-' || h %% 500 ELSE '' END,
    CASE WHEN h %% 100 = 0 THEN n / 20 WHEN h %% 2 = 0 THEN n + %(requests)s END
FROM (
    SELECT n, %(end)s::timestamptz - n * (%(span)s::interval / %(requests)s) AS at, h, outcome,
        CASE WHEN n %% 10 = 0 THEN 0 ELSE 1 + n %% (%(tenants)s - 1) END AS tenant,
        (%(models)s::text[])[1 + n %% 3] AS model,
        CASE WHEN outcome <> 'completed' THEN '' WHEN h %% 1000 < 40 THEN 'exact' WHEN h %% 1000 < 50
            THEN 'single_flight' WHEN h %% 1000 < 60 THEN 'semantic' WHEN h %% 1000 < 390 THEN 'prefix'
            ELSE 'computed' END AS layer,
        CASE WHEN h %% 1000 < 60 THEN 5 + h %% 30 ELSE 60 + h %% 400 + CASE h %% 20 WHEN 0 THEN h %% 6000 ELSE 0 END
            END AS ttft
    FROM (
        SELECT n, hashint8(n) & 2147483647 AS h,
            CASE WHEN n %% 211 = 0 THEN 'limited' WHEN n %% 503 = 0 THEN 'failed' ELSE 'completed' END AS outcome
        FROM generate_series(0, %(requests)s::bigint - 1) n
    ) numbered
) r
"""
_EVENTS = """
INSERT INTO billing_usageevent (admitted_at, request_id, execution, tenant_id, project_id, key_id, model, attempt,
    outcome, finish_reason, uncached, cache_read, cache_write_5m, cache_write_1h, output, answer_hit_input,
    answer_hit_output, replica_id, block_size, queue_us, ttft_us, duration_us, cost_femto, saved_femto, settled_at,
    miss_reason, changed_at)
SELECT started_at, request_id, 0, tenant_id, project_id, key_id, served_model, 1, outcome, 'stop',
    CASE WHEN hit THEN 0 ELSE prompt_tokens END, CASE cache_layer WHEN 'prefix' THEN 512 ELSE 0 END, 0, 0,
    CASE WHEN hit THEN 0 ELSE output END, CASE WHEN hit THEN prompt_tokens ELSE 0 END,
    CASE WHEN hit THEN output ELSE 0 END, 'r', 32, 10, ttft_ms * 1000, total_ms * 1000,
    CASE WHEN hit THEN 1 ELSE 4 END * prompt_tokens * 750000000::numeric,
    CASE WHEN hit THEN prompt_tokens * 2250000000::numeric WHEN cache_layer = 'prefix' THEN 512 * 600000000::numeric
        ELSE 0 END, started_at + interval '1 second', reason,
    CASE reason WHEN 'prefix_changed' THEN 100 + 640 * (prompt_tokens % 3) END
FROM (
    SELECT r.*, cache_layer IN ('exact', 'single_flight', 'semantic') AS hit, 20 + total_ms % 300 AS output,
        CASE WHEN cache_layer <> 'computed' THEN '' WHEN total_ms % 100 < 10 THEN 'prefix_changed'
            WHEN total_ms % 100 < 50 THEN 'first_use' WHEN total_ms % 100 < 70 THEN 'expired_or_evicted' ELSE ''
            END AS reason
    FROM request_log_requestrecord r WHERE outcome <> 'limited'
) r
"""
_FEEDBACK = """
INSERT INTO feedback_submittedfeedback (tenant_id, request_id, key_id, success)
SELECT tenant_id, request_id, key_id, total_ms % 5 > 0 FROM request_log_requestrecord
WHERE outcome = 'completed' AND total_ms % 100 = 1
"""
# One of the three models is served by an upstream.
_COSTS = """
INSERT INTO billing_executioncost (admitted_at, request_id, execution, tenant_id, model, is_tenant_credential,
    usage_source, outcome, uncached, cache_read, cache_write_5m, cache_write_1h, output, cost_femto, uncosted_tokens,
    unbilled_femto, booked_at)
SELECT admitted_at, request_id, execution, tenant_id, model, false, 'upstream', outcome, uncached, cache_read, 0, 0,
    output, (uncached + output) * 2000000000::numeric, 0, 0, settled_at
FROM billing_usageevent WHERE model = 'llama-70b'
"""
_DAILY_COSTS = """
INSERT INTO billing_dailycost (day, tenant_id, model, credential_id, executions, estimated, cost_femto, failed_femto,
    uncosted_tokens, unbilled_femto)
SELECT (admitted_at AT TIME ZONE 'UTC')::date, tenant_id, model, 0, count(*), 0, sum(cost_femto),
    coalesce(sum(cost_femto) FILTER (WHERE outcome = 'failed'), 0), 0, 0
FROM billing_executioncost GROUP BY 1, 2, 3
"""
_STATEMENTS = {
    "requests": _RECORDS,
    "usage events": _EVENTS,
    "feedback": _FEEDBACK,
    "costs": _COSTS,
    "daily costs": _DAILY_COSTS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests of 31 days (default 1,000,000)")
    parser.add_argument("--keys", type=int, default=10_000, help="API keys (default 10,000)")
    parser.add_argument("--tenants", type=int, default=1000, help="tenants (default 1,000)")
    parser.add_argument("--times", type=int, default=20, help="measured requests of each screen (default 20)")
    parser.add_argument("--only", default="", help="only screens with this text in their name")
    parser.add_argument("--data", type=Path, help="a directory that keeps the filled database for the next run")
    parser.add_argument("--slow-ms", type=float, help="print the statements of each screen that take longer")
    options = parse(parser, {"requests": 1000, "keys": 60, "tenants": 6, "times": 1})
    with ExitStack() as running:
        began = time.perf_counter()
        is_filled = _set_up(running, options.data)
        tenant = _first_tenant() if is_filled else _fill(options)
        _roll_up()
        print(
            f"{options.requests:,} requests, {options.keys:,} keys, {options.tenants:,} tenants, filled in"
            f" {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        slow = _measure(tenant, options)
    print(f"{slow} above {TARGET_MS} ms" if slow else f"all within {TARGET_MS} ms")


def _set_up(running: ExitStack, kept: Path | None) -> bool:
    """Start the servers with an up-to-date schema. Return whether the database is filled."""
    if kept is None:
        state = Path(tempfile.mkdtemp(prefix="millrace-console-"))
        running.callback(shutil.rmtree, state, ignore_errors=True)
    else:
        state = kept.absolute()
        state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o711)
    postgres, valkey = Postgres(state), Valkey(state)
    for server in (postgres, valkey):
        program = server.prepare()
        process = program.start(running.enter_context((state / f"{program.name}.log").open("ab")))
        running.callback(program.stop, process)
    postgres.make_roles()
    os.environ.update(
        MILLRACE_DATA_DIR=str(state),
        MILLRACE_DATABASE_URL=postgres.owner_url,
        MILLRACE_VALKEY_URL=valkey.url,
        **{f"MILLRACE_{name}": "b" * 50 for name in ("SECRET_KEY", "PREFIX_CACHE_SECRET", "KEY_PEPPERS")},
        MILLRACE_LOG_LEVEL="error",
        MILLRACE_ALLOWED_HOSTS="testserver",
        DJANGO_SETTINGS_MODULE="millrace.conf.settings",
    )
    import django
    from django.core.management import call_command
    from django.db import connections

    django.setup()
    call_command("migrate", verbosity=0)
    running.callback(connections.close_all)
    from tenants.models import User

    return User.objects.filter(email="operator@example.com").exists()  # created last


def _roll_up() -> None:
    """Update the rollups, as the jobs of the platform do."""
    from django.db import connection

    from billing.metering import rollups
    from millrace.apps.request_log import request_rollups

    began = time.perf_counter()
    rollups.build()
    request_rollups.build(wait=timedelta(0))
    print(f"rollups in {time.perf_counter() - began:.0f} s", flush=True)
    with connection.cursor() as cursor:
        cursor.execute("VACUUM ANALYZE")  # as autovacuum does after inserts


def _first_tenant() -> Any:
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope
    from tenants.models import Tenant

    with all_tenants_scope(BypassReason.COMMAND):
        return Tenant.objects.all_tenants().order_by("pk")[0]


def _fill(options: argparse.Namespace) -> Any:
    """Create the rows and return the measured tenant. The platform's own actions create what is few."""
    from django.db import connection

    from billing.actions.budgets import do_make_budget
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
        for label, statement in _STATEMENTS.items():
            began = time.perf_counter()
            cursor.execute(statement, values if statement is _RECORDS else None)
            print(f"{label} in {time.perf_counter() - began:.0f} s", flush=True)
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

    def timed(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        began = time.perf_counter()
        try:
            return execute(sql, params, many, context)
        finally:
            taken.append((1000 * (time.perf_counter() - began), " ".join(sql.split())))

    with connection.execute_wrapper(timed):
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
