"""Creation of all demo data, for the command, tests and screenshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from django.db import connection

from billing.budgets.alerts import check_thresholds
from millrace.demo import seeding
from millrace.demo.backfill import BackfillProgress, backfill
from millrace.demo.history import DAYS, DemoPeriod
from millrace.demo.invoices import Billed, invoice, welcome
from millrace.demo.seeding import DemoModels, DemoTenant, Secrets
from millrace.demo.tenants import CAST
from millrace.environment.configuration import platform_settings

EVENTS = 20_000  # approximate number for each tenant
_LOCK = 0x64656D6F  # a number that no other advisory lock uses


class DemoRunning(Exception):
    """Raised if another run is active."""


@dataclass(frozen=True)
class DemoResult:
    """The demo data after a run."""

    demo_tenants: list[DemoTenant]
    progress: BackfillProgress
    billed: Billed


def models() -> DemoModels:
    return DemoModels.of(platform_settings().models)


def secrets() -> Secrets:
    return Secrets(platform_settings().data_dir)


def create_demo(
    *,
    days: int = DAYS,
    events: int = EVENTS,
    password: str | None = None,
    on_progress: Callable[[BackfillProgress], None] = lambda progress: None,
) -> DemoResult:
    """Create the missing tenants and their history, and invoice the past months.

    Raises:
        DemoRunning: another run is active.
    """
    now = datetime.now(UTC)
    with _exclusive_run():
        stored_secrets, model_names = secrets(), models()
        demo_tenants = [seeding.create_tenant(spec, stored_secrets, model_names, password) for spec in CAST]
        period = DemoPeriod(days, events, now)
        entity = seeding.create_billing(demo_tenants, model_names, _first_day(demo_tenants, days))
        welcome(demo_tenants, now)
        progress = backfill(demo_tenants, period, model_names, on_progress)
        check_thresholds()
        return DemoResult(demo_tenants, progress, invoice(entity, now))


def _first_day(demo_tenants: list[DemoTenant], days: int) -> date:
    return min(demo_tenant.tenant.created_at for demo_tenant in demo_tenants).date() - timedelta(days=days)


@contextmanager
def _exclusive_run() -> Iterator[None]:
    """Lock the demo data for one run. The lock belongs to the session, so it is released if the run is killed."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [_LOCK])
        if not cursor.fetchone()[0]:
            raise DemoRunning("Another run is active. Wait until it ends.")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])
