"""The whole of it, for the command, for tests and for screenshots."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from django.db import connection

from billing.budgets.alerts import check_thresholds
from millrace.conf.environment import platform_settings
from millrace.devserver.demo import seeding
from millrace.devserver.demo.backfill import BackfillProgress, backfill
from millrace.devserver.demo.history import DAYS, DemoPeriod
from millrace.devserver.demo.invoices import Billed, invoice, welcome
from millrace.devserver.demo.seeding import DemoModels, DemoTenant, Secrets
from millrace.devserver.demo.tenants import CAST

EVENTS = 20_000  # of each tenant, about
_LOCK = 0x64656D6F  # any number that is nobody else's advisory lock


class Busy(Exception):
    """Another run is under way."""


@dataclass(frozen=True)
class Played:
    """What a run has made or found."""

    players: list[DemoTenant]
    told: BackfillProgress
    billed: Billed


def models() -> DemoModels:
    return DemoModels.of(platform_settings().models)


def secrets() -> Secrets:
    return Secrets(platform_settings().data_dir)


def play(
    *,
    days: int = DAYS,
    events: int = EVENTS,
    password: str | None = None,
    now: datetime | None = None,
    tell: Callable[[BackfillProgress], None] = lambda told: None,
) -> Played:
    """Make the tenants and their history, as far as either is missing, and invoice the months that are over.

    Raises:
        Busy: another run is at it.
    """
    now = now or datetime.now(UTC)
    with _alone():
        kept, served = secrets(), models()
        players = [seeding.enter(spec, kept, served, password) for spec in CAST]
        span = DemoPeriod(days, events, now)
        entity = seeding.bill(players, served, _began(players, days))
        welcome(players, now)
        told = backfill(players, span, served, tell)
        check_thresholds()
        return Played(players, told, invoice(entity, now))


def _began(players: list[DemoTenant], days: int) -> date:
    return min(player.tenant.created_at for player in players).date() - timedelta(days=days)


@contextmanager
def _alone() -> Iterator[None]:
    """Lock the demo data for one run. The lock belongs to the session, so a killed run releases it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s)", [_LOCK])
        if not cursor.fetchone()[0]:
            raise Busy("Another run is under way.")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])
