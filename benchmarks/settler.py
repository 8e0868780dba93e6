"""How many usage events a second one settler brings into PostgreSQL: `python benchmarks/settler.py`.

Starts a PostgreSQL (with fsync, as in production) and a Valkey of its own in a temporary folder, fills the stream, and
drains it with batches of several sizes. Each event is rated by a price sheet and settles a hold from one of 64 slices
of three windows. Prints one table; CPU is this process' own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [path for path in (str(ROOT), str(ROOT / "platform")) if path not in sys.path]

from millrace.services.postgres import Postgres  # noqa: E402  (after the path it needs)
from millrace.services.valkey import Valkey  # noqa: E402

SLICES = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=20_000, help="events for each row of the table")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 200, 1000], help="batch sizes")
    options = parser.parse_args()
    with ExitStack() as running:
        set_up(running)
        print(f"{'batch':>6} {'events':>8} {'seconds':>8} {'events/s':>9} {'CPU us':>7} {'repeats/s':>9}")
        sheet = _set_up_money()
        for batch in options.batches:
            events = min(options.events, batch * 500)
            (first, cpu), (again, _) = (_drain(batch, events, f"{batch}", sheet) for _ in range(2))
            a_event = cpu / events * 1e6
            print(f"{batch:>6} {events:>8} {first:>8.2f} {events / first:>9.0f} {a_event:>7.1f} {events / again:>9.0f}")


def set_up(running: ExitStack) -> None:
    state = Path(tempfile.mkdtemp(prefix="millrace-settler-"))
    running.callback(shutil.rmtree, state, ignore_errors=True)
    state.chmod(0o711)
    postgres, valkey = Postgres(state), Valkey(state)
    for server in (postgres, valkey):
        program = server.prepare()
        process = program.start(running.enter_context((state / f"{program.name}.log").open("ab")))
        running.callback(program.stop, process)
    postgres.make_roles()
    os.environ.update(
        MILLRACE_STATE_DIR=str(state),
        MILLRACE_DATABASE_URL=postgres.owner_url,
        MILLRACE_BROKER_URL=valkey.url,
        MILLRACE_SECRET_KEY="b" * 50,
        MILLRACE_CACHE_SECRET="b" * 50,
        MILLRACE_KEY_PEPPERS="b" * 50,
        MILLRACE_LOG_LEVEL="warning",
        DJANGO_SETTINGS_MODULE=os.environ.get("DJANGO_SETTINGS_MODULE", "millrace.settings"),
    )
    import django
    from django.core.management import call_command
    from django.db import connections

    django.setup()
    call_command("migrate", verbosity=0)
    running.callback(connections.close_all)


def _set_up_money() -> int:
    """List A's prices, a day's, a month's and a lifetime's window, and slices of all three; the sheet's version."""
    from datetime import UTC, datetime

    from billing.models import CompiledSheet, Slice, Window
    from billing.pricing import Component, Rate, encode_rates
    from tenants.roles import SystemUse
    from tenants.scoping import system

    now = datetime.now(UTC)
    prices = {Component.UNCACHED: 3 * 10**9, Component.CACHE_READ: 3 * 10**8, Component.OUTPUT: 15 * 10**9}
    rates = tuple(Rate(place, component, price) for place, (component, price) in enumerate(prices.items(), start=1))
    with system(SystemUse.COMMAND):
        ids = [
            Window.objects.create(tenant_id=1, budget_id=number, unit="money", period_start=now, held=10**17).pk
            for number in range(3)
        ]
        for number in range(1, SLICES + 1):
            plenty = {"money": 10**15, "tokens": 10**12, "requests": 10**9}
            Slice.objects.create(
                pk=number,
                tenant_id=1,
                gateway_id="b",
                windows=ids,
                sealed=False,
                made_at=now,
                leased_until=now,
                reap_at=now,
                **plenty,
            )
        sheet = CompiledSheet.objects.create(
            model="smollm2-135m", tier="standard", effective_from=now, rates=encode_rates(rates)
        )
    return int(sheet.pk)


def _drain(batch: int, events: int, name: str, sheet: int) -> tuple[float, float]:
    from billing.settler import Settler, connect

    broker = connect(os.environ["MILLRACE_BROKER_URL"])
    _fill(broker, events, name, sheet)
    settler = Settler(broker, consumer="benchmark", stopping=threading.Event(), batch=batch)
    start, cpu = time.perf_counter(), time.process_time()
    assert settler.drain() == events
    return time.perf_counter() - start, time.process_time() - cpu


def _fill(broker: Any, events: int, name: str, sheet: int) -> None:
    from inference_worker.engine.request import TokenUsage
    from inference_worker.protocol import USAGE_STREAM, Envelope, UsageEvent, encode

    now = (time.time_ns() // 10**15) * 10**12  # the same in both runs of a row: the second is all repeats
    for start in range(0, events, 1000):
        pipe = broker.pipeline(transaction=False)
        for number in range(start, min(start + 1000, events)):
            money = (sheet, 1 + number % SLICES, 1, 91_440_000, 14_096)
            envelope = Envelope(now, f"req_{name}_{number:026d}", 0, 1, 1, 1 + number % 50, "smollm2-135m", *money)
            usage = TokenUsage(uncached=40 + number % 100, cache_read=64, output=120)
            event = UsageEvent(envelope, 1, "completed", "stop", usage, "smollm2-135m-0.0a1b2c3d", 32, 10, 20, 30)
            pipe.xadd(USAGE_STREAM, {"e": encode(event)})
        pipe.execute()


if __name__ == "__main__":
    main()
