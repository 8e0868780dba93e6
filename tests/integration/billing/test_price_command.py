"""`manage.py price_book`, and the preview of a version's cost."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from billing.invoicing.repricing import last_month, preview
from billing.metering.ingest import UsageMessage, settle
from billing.metering.partitions import month_of
from billing.models import CompiledRateCard, Price, PriceVersion
from billing.pricing.prices import do_propose_prices, do_publish_prices
from billing.rates.price_book import NewPrice, Proposal, nano_per_million
from billing.rates.pricing import Component, Tier
from inference_worker.contract.messages import encode
from millrace.environment.configuration import platform_settings
from tenants.actions import do_create_tenant
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db
FILE = Path(__file__).parents[2] / "data" / "prices" / "model_prices_and_context_window.json"


def run(*arguments: str) -> str:
    out = StringIO()
    call_command("price_book", *arguments, stdout=out)
    return out.getvalue()


def draft(at: datetime | None = None, **usd: str) -> PriceVersion:
    prices = [NewPrice("m", Tier.STANDARD, Component(name), nano_per_million(each)) for name, each in usd.items()]
    return do_propose_prices(Proposal(tuple(prices)), effective_from=at)


def test_a_file_is_imported_previewed_and_published():
    said = run("import", str(FILE), "--note", "public")
    assert "1.142857142857143E-7" in said
    assert "gemini-2.5-pro, batch, cache_read = 0.125 (as cache_read of the standard tier)" in said
    pk = unscoped(PriceVersion).get().pk
    assert "No usage" in run("preview", str(pk))
    assert "version 1" in run("publish", str(pk))
    assert "published" in run("list")
    assert unscoped(CompiledRateCard).count() > 10
    with pytest.raises(CommandError, match="published"):
        run("publish", str(pk))


def test_a_csv_for_a_tenant_is_imported(tmp_path):
    tenant = do_create_tenant("acme", "Acme")
    (tmp_path / "own.csv").write_text("model,tier,component,usd_per_million\nm,,output,9.5\n")
    run("import", str(tmp_path / "own.csv"), "--tenant", "acme")
    assert unscoped(PriceVersion).get().tenant_id == tenant.pk
    run("discard", str(unscoped(PriceVersion).get().pk))
    assert "discarded" in run("list")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("import", "nowhere.json"), "nowhere"),
        (("import", str(FILE), "--tenant", "unknown"), "unknown"),
        (("import", str(FILE), "--models", "none"), "no price"),
        (("publish", "7"), "no draft 7"),
    ],
)
def test_errors_are_printed(arguments, message):
    with pytest.raises(CommandError, match=message):
        run(*arguments)


def test_the_embedded_models_are_priced_once():
    run("backfill")
    names = {spec.name for spec in platform_settings().models if spec.source == "embedded"}
    priced = unscoped(Price).filter(tier="standard", component="output")
    assert {(row.model, row.nano_per_million) for row in priced} == {(name, 15 * 10**9) for name in names}
    assert len(names) == 2
    before = unscoped(Price).count()
    run("backfill")
    assert unscoped(Price).count() == before


def test_the_preview_re_rates_last_month_and_publishes_nothing(event):
    start, end = last_month()
    do_publish_prices(draft(start, uncached="3", cache_read="3", output="15"), by=None)
    version = unscoped(CompiledRateCard).get().pk
    acme, other = do_create_tenant("acme", "Acme"), do_create_tenant("other", "Other")
    of_m = {"model": "m", "price_version": version, "cache_read": 0}
    inside = [
        event(at=start, tenant_id=acme.pk, uncached=1_000_000, output=0, **of_m),
        event(at=end - timedelta(microseconds=1), tenant_id=acme.pk, uncached=0, output=1_000_000, **of_m),
        event(at=start, tenant_id=other.pk, uncached=2_000_000, output=0, **of_m),
    ]
    outside = [
        event(at=end, tenant_id=acme.pk, uncached=1_000_000, **of_m),
        event(at=start, tenant_id=acme.pk, uncached=1_000_000, outcome="failed", **of_m),
        event(at=start, tenant_id=acme.pk, uncached=1_000_000),
    ]
    settle([UsageMessage(f"{n}-0", encode(each)) for n, each in enumerate([*inside, *outside])])
    cheaper = draft(uncached="2.5", cache_read="2", output="10")
    found = [(row.tenant_id, row.events, row.was_femto, row.would_be_femto) for row in preview(cheaper, start, end)]
    usd = 10**15
    assert found == [(acme.pk, 2, 18 * usd, 125 * usd // 10), (other.pk, 1, 6 * usd, 5 * usd)]
    assert unscoped(CompiledRateCard).count() == 1
    assert unscoped(Price).count() == 3
    (row, _) = preview(draft(output="1"), start, end)
    assert (row.unpriced, row.events, row.would_be_femto) == (1, 2, usd)


def test_the_preview_of_a_withdrawn_tier_is_what_standard_costs(event):
    start, end = last_month()
    do_publish_prices(draft(start, uncached="3", cache_read="3", output="15"), by=None)
    batch = [NewPrice("m", Tier.BATCH, Component.UNCACHED, nano_per_million("1"))]
    do_publish_prices(do_propose_prices(Proposal(tuple(batch)), effective_from=start), by=None)
    version = next(row.pk for row in unscoped(CompiledRateCard).all() if row.tier == "batch")
    settle([UsageMessage("1-0", encode(event(at=start, model="m", price_version=version, cache_read=0, output=0)))])
    (row,) = preview(do_propose_prices(Proposal(withdrawn=(("m", Tier.BATCH),))), start, end)
    assert (row.unpriced, row.was_femto, row.would_be_femto) == (0, 10 * 10**9, 30 * 10**9)


def test_last_month_is_the_calendars():
    assert last_month(datetime(2027, 1, 5, tzinfo=UTC)) == (
        datetime(2026, 12, 1, tzinfo=UTC),
        datetime(2027, 1, 1, tzinfo=UTC),
    )
    assert month_of(last_month()[1]) == month_of(datetime.now(UTC))


def test_hours_without_a_price_need_a_confirmation(tmp_path):
    heading = "model,tier,component,usd_per_million,from_tokens,until_tokens,from_time,until_time"
    (tmp_path / "night.csv").write_text(f"{heading}\nm,,uncached,1,,,22:00,06:00\nm,,output,1,,,,\n")
    with pytest.raises(CommandError, match=r"No price for m \(standard\): uncached from 06:00 to 22:00 UTC"):
        run("import", str(tmp_path / "night.csv"))
    assert not unscoped(PriceVersion).all()
    run("import", str(tmp_path / "night.csv"), "--allow-unpriced-hours")
    assert unscoped(PriceVersion).count() == 1


def test_prices_that_start_before_priced_usage_need_a_confirmation(event):
    start, _ = last_month()
    do_publish_prices(draft(start, uncached="3", cache_read="3", output="15"), by=None)
    version = unscoped(CompiledRateCard).get().pk
    settle([UsageMessage("1-0", encode(event(at=start + timedelta(days=1), model="m", price_version=version)))])
    over = draft(start + timedelta(hours=1), uncached="1", cache_read="1", output="1")
    with pytest.raises(CommandError, match="has prices already"):
        run("publish", str(over.pk))
    assert "version 2" in run("publish", str(over.pk), "--confirm")
