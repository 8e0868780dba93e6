"""The duration of invoicing a month, of recomputing the same bytes, and of archiving and restoring the month's usage:
`python -m benchmarks.invoices`.

It starts a separate PostgreSQL and fills a month with priced usage events. Then it invoices every tenant (close, draft,
finalize with PDF and ledger), recomputes each invoice from the events, sums the events by hour, archives the events to
files and restores them. It prints one table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.options import parse
from benchmarks.services import start_services

MODELS = ("llama-70b", "qwen-8b", "smollm2-135m")
COMPONENTS = {"uncached": 3, "cache_read": 1, "cache_write_5m": 4, "output": 15}  # USD a million
MONTH = datetime(2026, 8, 1, tzinfo=UTC)  # has 31 days, and is old enough to be archived
# Two versions of prices, one from the 12th on; the busiest tenant has many times the events of the quietest.
_EVENTS = """
INSERT INTO billing_usageevent (admitted_at, request_id, execution, tenant_id, project_id, key_id, model, attempt,
    outcome, finish_reason, uncached, cache_read, cache_write_5m, cache_write_1h, output, replica_id, block_size,
    queue_us, ttft_us, duration_us, price_ids, cost_femto, invoice_period, settled_at)
SELECT at, 'req_' || md5(n::text), 0, tenant, 1, 1, model, 1, 'completed', 'stop', 40 + n %% 1000, 64 * (n %% 30),
    CASE WHEN n %% 9 = 0 THEN 512 ELSE 0 END, 0, 20 + n %% 300, 'r', 32, 10, 20, 30,
    p.ids, 0, %(period)s, at + interval '1 second'
FROM (
    SELECT n, %(start)s::timestamptz + n * (interval '31 days' / %(events)s) AS at,
        %(first)s + floor(%(tenants)s * power((n * 7919 %% 100003) / 100003.0, 2))::bigint AS tenant,
        (%(models)s::text[])[1 + n %% 3] AS model
    FROM generate_series(0, %(events)s::bigint - 1) n
) e JOIN jsonb_to_recordset(%(prices)s::jsonb) AS p(model text, late boolean, ids bigint[]) USING (model)
WHERE p.late = (at >= %(change)s)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000, help="usage events of the month (default 1,000,000)")
    parser.add_argument("--tenants", type=int, default=200, help="tenants that used something (default 200)")
    options = parse(parser, {"events": 600, "tenants": 3})
    with ExitStack() as running:
        start_services(running)
        _measure("fill", lambda: _fill(options.events, options.tenants))
        numbers = _measure("invoice", _invoice)
        _measure("recompute", lambda: _recompute(len(numbers)))
        _measure("sum", _sum)
        with tempfile.TemporaryDirectory(prefix="millrace-archive-") as directory:
            _measure("archive", lambda: _archive(Path(directory)))
            files = sum(path.stat().st_size for path in Path(directory).iterdir())
            _measure("restore", lambda: _restore(Path(directory)))
        print(f"{files / 2**20:.0f} MiB of files")
        print(f"{len(numbers)} invoices of {options.events} events, {numbers[0]} to {numbers[-1]}")


def _measure(label, run):
    start, cpu = time.perf_counter(), time.process_time()
    result = run()
    print(f"{label:>10} {time.perf_counter() - start:7.1f} s   of which {time.process_time() - cpu:6.1f} s in Python")
    return result


def _fill(events: int, tenants: int) -> None:
    from django.db import connection

    from billing.models import Period
    from billing.periods import default_entity, ensure_periods
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope
    from tenants.models import Tenant

    with all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute("SELECT billing_create_partitions(%s)", [[MONTH.date()]])
        entity = default_entity()
        ensure_periods(entity, MONTH, MONTH)
        period = Period.objects.get(entity=entity, starts_at=MONTH)
        rows = [Tenant(slug=f"t{number}", name=f"Tenant {number}") for number in range(tenants)]
        first = Tenant.objects.all_tenants().bulk_create(rows)[0].pk
        prices = [
            {"model": model, "late": number == 2, "ids": ids}
            for number, start, end in ((1, MONTH, _change()), (2, _change(), None))
            for model, ids in _prices(number, start, end).items()
        ]
        parameters = {"period": period.pk, "start": MONTH, "change": _change(), "events": events, "tenants": tenants}
        cursor.execute(_EVENTS, {**parameters, "first": first, "models": list(MODELS), "prices": json.dumps(prices)})


def _change() -> datetime:
    return MONTH.replace(day=12)


def _prices(number: int, start: datetime, end: datetime | None) -> dict[str, list[int | None]]:
    """Return the ids of a version's prices by model, in the order of the events' columns."""
    from billing.currencies.amounts import NANO_A_DOLLAR
    from billing.models import Price, PriceBook, PriceVersion
    from billing.rates.pricing import COMPONENTS as ORDER

    book, _ = PriceBook.objects.get_or_create(name="list")
    version = PriceVersion.objects.create(book=book, number=number, state="published", body={}, effective_from=start)
    values = {"version": version, "book": book, "tier": "standard", "effective_from": start, "effective_until": end}
    return {
        model: [
            Price.objects.create(
                model=model, component=name, nano_per_million=COMPONENTS[name] * NANO_A_DOLLAR, **values
            ).pk
            if name in COMPONENTS
            else None
            for name in ORDER
        ]
        for model in MODELS
    }


def _invoice() -> list[str]:
    from billing.invoicing.runs import invoice_months

    report = invoice_months(month=f"{MONTH:%Y-%m}")
    assert not report.left, report.left
    return sorted(report.finalized)


def _recompute(invoices: int) -> None:
    from billing.invoicing.checks import recompute_document
    from billing.invoicing.lines import count_usage, find_usage
    from billing.invoicing.pdf import render_pdf
    from billing.models import Invoice, InvoiceFile, Period
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    with all_tenants_scope(BypassReason.COMMAND):
        period = Period.objects.select_related("entity").get(starts_at=MONTH)
        uses, counts = find_usage(period), count_usage(period)
        stored = dict(InvoiceFile.objects.all_tenants().values_list("invoice_id", "pdf"))
        rows = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to").filter(period=period)
        same = [
            render_pdf(recompute_document(row, uses[row.tenant_id], counts[row.tenant_id])) == bytes(stored[row.pk])
            for row in rows
        ]
    assert same == [True] * invoices, "a recomputed invoice differs"


def _sum() -> None:
    from billing.metering import rollups

    rollups.build()


def _archive(directory: Path) -> None:
    from billing.metering.archive_actions import do_archive

    do_archive(MONTH.date(), directory, drop=True)


def _restore(directory: Path) -> None:
    from billing.metering.archive_actions import do_restore
    from billing.metering.archives import manifest_path

    do_restore(manifest_path(directory, MONTH.date()))


if __name__ == "__main__":
    main()
