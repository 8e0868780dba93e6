"""How many usage events a second one settler brings into PostgreSQL, and how soon: `python -m benchmarks.settler`.

Starts a PostgreSQL (with fsync, as in production) and a Valkey of its own in a temporary folder, fills the stream, and
drains it with batches of several sizes. The mix: 200 tenants, each with three budget periods, priced by list A; half of
the events settle a hold from one of the tenant's four leases; one in twenty comes twice. CPU is this process' own.
"Until its row" is from one event, sent alone, until another session sees its row: median, and of 100 the 95th.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import secrets
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import product

from benchmarks.options import parse
from benchmarks.services import start_services

TENANTS = 200
LEASES = 4  # per tenant
LIST_A = {"uncached": 3000, "cache_write_5m": 3750, "cache_write_1h": 6000, "cache_read": 300, "output": 15000}
CHANCE = random.Random(7)  # noqa: S311  (nothing secret)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=40_000, help="events for each row of the table")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 200, 1000], help="batch sizes")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="parallel settlers in the process")
    parser.add_argument("--rounds", type=int, default=1, help="rounds, of which the median counts")
    parser.add_argument("--samples", type=int, default=100, help="single events, each timed until its row is visible")
    options = parse(parser, {"events": 400, "batches": [200], "threads": [2], "samples": 3})
    with ExitStack() as running:
        start_services(running)
        rate_card = _set_up_money()
        gc.collect()
        gc.freeze()  # as `manage.py run_settler` does
        print(f"{'threads':>7} {'batch':>6} {'events':>8} {'events/s':>9} {'CPU us':>7} {'repeats/s':>9}")
        for batch, threads in product(options.batches, options.threads):
            events = min(options.events, batch * 500)
            taken = [_drain_twice(batch, threads, events, rate_card) for _ in range(options.rounds)]
            first, cpu, again = (statistics.median(column) for column in zip(*taken, strict=True))
            figures = f"{events / first:>9.0f} {cpu / events * 1e6:>7.1f} {events / again:>9.0f}"
            print(f"{threads:>7} {batch:>6} {events:>8} {figures}", flush=True)
        times = sorted(_until_rows(rate_card, options.samples))
        print(
            f"until its row: {statistics.median(times) * 1e3:.1f} ms, p95 {times[len(times) * 95 // 100] * 1e3:.1f} ms"
        )


def _set_up_money() -> int:
    """List A's prices; a day's, a month's and a lifetime's budget period of each tenant, and leases of all three; the
    rate card's version."""
    from datetime import UTC, datetime, timedelta

    from billing.models import BudgetLease, BudgetPeriod, CompiledRateCard
    from billing.rates.pricing import Component, Rate, encode_rates
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    now = datetime.now(UTC)
    rates = tuple(
        Rate(place, Component(name), price * 10**6) for place, (name, price) in enumerate(LIST_A.items(), start=1)
    )
    plenty = {"money": 10**14, "tokens": 10**11, "requests": 10**8, "fully_reserved": False, "gateway_id": "b"}
    times = {"created_at": now, "leased_until": now, "reclaim_at": now + timedelta(days=1)}
    with all_tenants_scope(BypassReason.COMMAND):
        for tenant in range(1, TENANTS + 1):
            budget_periods = [
                BudgetPeriod.objects.create(
                    tenant_id=tenant, budget_id=tenant * 3 + each, unit="money", period_start=now, reserved=4 * 10**14
                )
                for each in range(3)
            ]
            for each in range(LEASES):
                ids = [budget_period.pk for budget_period in budget_periods]
                number = tenant * LEASES + each
                BudgetLease.objects.create(pk=number, tenant_id=tenant, budget_period_ids=ids, **plenty, **times)
        rate_card = CompiledRateCard.objects.create(
            model="smollm2-135m", tier="standard", effective_from=now, rates=encode_rates(rates)
        )
    return int(rate_card.pk)


def _drain_twice(batch: int, threads: int, events: int, rate_card: int) -> tuple[float, float, float]:
    """Seconds and CPU seconds for new events, and seconds for the same once more, all repeats."""
    messages = [_message(rate_card) for _ in range(events * 19 // 20)]
    messages += CHANCE.sample(messages, events - len(messages))
    first, cpu = _drain(batch, threads, messages)
    again, _ = _drain(batch, threads, messages)
    return first, cpu, again


def _drain(batch: int, threads: int, messages: list[bytes]) -> tuple[float, float]:
    from django.db import connection

    from billing.metering.settler import Settler
    from inference_worker.contract import valkey
    from inference_worker.contract.messages import USAGE_STREAM

    broker = valkey.connect(os.environ["MILLRACE_VALKEY_URL"], valkey.SETTLER)
    for start in range(0, len(messages), 1000):
        pipe = broker.pipeline(transaction=False)
        for message in messages[start : start + 1000]:
            pipe.xadd(USAGE_STREAM, {"e": message})
        pipe.execute()
    stopping = threading.Event()
    settlers = [
        Settler(
            valkey.connect(os.environ["MILLRACE_VALKEY_URL"], valkey.SETTLER),
            consumer=f"b{number}",
            stopping=stopping,
            batch=batch,
        )
        for number in range(threads)
    ]

    def drain(settler: Settler) -> int:
        with closing(connection):
            return settler.drain()

    began, cpu = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(drain, settlers))
    taken = time.perf_counter() - began, time.process_time() - cpu
    assert done == len(messages)
    return taken


def _message(rate_card: int) -> bytes:
    from inference_worker.contract.messages import BillingContext, ExecutionUsage, encode
    from inference_worker.contract.request import TokenCounts

    chance, at = CHANCE, time.time_ns() // 1000
    tenant = chance.randint(1, TENANTS)
    lease, fencing_token = (tenant * LEASES + chance.randrange(LEASES), 1) if chance.random() < 0.5 else (None, None)
    money = (rate_card, lease, fencing_token, 91_440_000, 14_096)  # held: nano-USD and tokens
    name = f"req_{at // 1000:012x}{secrets.token_hex(10)}"
    trace = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"
    key = tenant * 5 + chance.randrange(5)
    billing_context = BillingContext(at, name, 0, tenant, tenant, key, "smollm2-135m", *money, trace)
    usage = TokenCounts(
        uncached=chance.randrange(1000), cache_read=32 * chance.randrange(100), output=chance.randrange(500)
    )
    times = (chance.randrange(10**4), chance.randrange(10**6), chance.randrange(10**7))
    return encode(ExecutionUsage(billing_context, 1, "completed", "stop", usage, "smollm2-135m-0.0a1b2c3d", 32, *times))


def _until_rows(rate_card: int, samples: int) -> list[float]:
    """Seconds from sending an event until its row is there, one after another."""
    from django.db import connection

    from billing.metering.settler import Settler
    from inference_worker.contract import valkey
    from inference_worker.contract.messages import USAGE_STREAM, decode_usage
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    broker, stopping, times = valkey.connect(os.environ["MILLRACE_VALKEY_URL"], valkey.SETTLER), threading.Event(), []
    own = valkey.connect(os.environ["MILLRACE_VALKEY_URL"], valkey.SETTLER)
    thread = threading.Thread(target=Settler(broker, consumer="benchmark", stopping=stopping).run)
    thread.start()
    for _ in range(samples):
        time.sleep(CHANCE.uniform(0.05, 0.15))
        message = _message(rate_card)
        name = decode_usage(message).billing_context.request_id
        start, found = time.perf_counter(), False
        own.xadd(USAGE_STREAM, {"e": message})
        while not found:
            with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
                cursor.execute("SELECT EXISTS (SELECT FROM billing_usageevent WHERE request_id = %s)", [name])
                found = cursor.fetchone()[0]
        times.append(time.perf_counter() - start)
    stopping.set()
    thread.join()
    return times


if __name__ == "__main__":
    main()
