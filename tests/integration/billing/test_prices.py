"""The price book: publication, precedence, immutability, non-overlapping prices, and imports."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.db import DatabaseError, IntegrityError, connection, transaction
from hypothesis import given
from hypothesis import strategies as st

from billing.models import CompiledRateCard, Price, PriceVersion
from billing.pricing.prices import do_assign_book, do_discard_prices, do_propose_prices, do_publish_prices
from billing.rates.price_book import NewPrice, Proposal, nano_per_million
from billing.rates.price_files import read_csv, read_public
from billing.rates.pricing import NO_END, Component, PriceIndex, RateCard, Tier
from billing.rates.pricing import price as cost_of
from inference_worker.contract.request import TokenCounts
from tenants.actions import do_create_tenant
from tenants.actions.common import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import AuditEntry, User
from tests.support.rows import unscoped

pytestmark = pytest.mark.django_db
C = Component
FILE = Path(__file__).parents[2] / "data" / "prices" / "model_prices_and_context_window.json"
NOW = datetime.now(UTC)
HOUR = timedelta(hours=1)


def price(usd: str, component: Component = C.UNCACHED, model: str = "m", **more: Any) -> NewPrice:
    return NewPrice(model, Tier.STANDARD, component, nano_per_million(usd), **more)


def publish(*prices: NewPrice, at: datetime | None = None, withdrawn: tuple = (), **where) -> PriceVersion:
    draft = do_propose_prices(Proposal(prices, withdrawn), effective_from=at, **where)
    return do_publish_prices(draft, by=None)


def found(tenant: int = 1, at: datetime | None = None, model: str = "m") -> RateCard | None:
    index = PriceIndex()
    index.add(row.decode() for row in unscoped(CompiledRateCard).order_by("pk"))
    moment = at or datetime.now(UTC) + timedelta(seconds=1)
    return index.find(tenant, model, Tier.STANDARD, round(moment.timestamp() * 1e6))


def usd(rate_card: RateCard | None) -> dict[str, str]:
    assert rate_card is not None
    return {rate.component.value: str(Decimal(rate.nano_per_million) / 10**9) for rate in reversed(rate_card.rates)}


@pytest.fixture
def people() -> tuple[User, User]:
    return User.objects.create_user("a@op.example"), User.objects.create_user("b@op.example")


def test_a_published_price_is_used():
    version = publish(price("3"), price("15", C.OUTPUT), note="first")
    assert (version.number, version.state) == (1, "published")
    assert usd(found()) == {"uncached": "3", "output": "15"}
    assert found(model="other") is None


def test_a_second_operator_publishes(people):
    author, second = people
    draft = do_propose_prices(Proposal((price("3"),)), created_by=author)
    assert found() is None
    with pytest.raises(ActionRefused, match="someone other than"):
        do_publish_prices(draft, by=author)
    do_publish_prices(draft, by=second)
    assert usd(found()) == {"uncached": "3"}
    with pytest.raises(Conflict, match="published"):
        do_publish_prices(draft, by=second)
    verbs = [
        (entry.action, entry.object_id) for entry in unscoped(AuditEntry).filter(action__startswith="price_version.")
    ]
    assert sorted(verbs) == [("price_version.created", draft.pk), ("price_version.published", draft.pk)]


def test_the_database_requires_a_second_operator_too(people):
    author, _ = people
    draft = do_propose_prices(Proposal((price("3"),)), created_by=author)
    with pytest.raises(IntegrityError, match="second_person"), all_tenants_scope(BypassReason.COMMAND):
        PriceVersion.objects.filter(pk=draft.pk).update(
            state="published", number=1, effective_from=NOW, decided_by=author
        )


def test_a_discarded_draft_is_never_published(people):
    draft = do_propose_prices(Proposal((price("3"),)), created_by=people[0])
    do_discard_prices(draft, by=people[0])
    with pytest.raises(Conflict, match="discarded"):
        do_publish_prices(draft, by=people[1])


def test_a_new_version_ends_the_old_prices_and_keeps_old_rate_cards():
    publish(price("3"), price("15", C.OUTPUT), at=NOW - HOUR)
    old = found(at=NOW - HOUR / 2)
    version = publish(price("2.5"))
    assert version.number == 2
    assert usd(found()) == {"uncached": "2.5"}, "a version sets all of a model's prices: output has none now"
    assert found(at=NOW - HOUR / 2) == old
    assert old is not None
    ended = unscoped(Price).filter(version__number=1)
    assert {row.effective_until for row in ended} == {version.effective_from}


def test_prices_start_at_their_effective_time():
    publish(price("3"), at=NOW - HOUR)
    publish(price("4"), at=NOW + HOUR)
    assert usd(found(at=NOW)) == {"uncached": "3"}
    assert usd(found(at=NOW + HOUR)) == {"uncached": "4"}
    with pytest.raises(Conflict, match="later"):
        publish(price("5"), at=NOW + HOUR / 2)
    assert usd(found(at=NOW + 2 * HOUR)) == {"uncached": "4"}


def test_prices_cannot_start_in_the_past(people):
    draft = do_propose_prices(Proposal((price("3"),)), effective_from=NOW - HOUR, created_by=people[0])
    with pytest.raises(Conflict, match="passed"):
        do_publish_prices(draft, by=people[1])


def test_a_withdrawn_model_has_no_price():
    publish(price("3"), at=NOW - HOUR)
    publish(withdrawn=(("m", Tier.STANDARD),))
    assert found() is None
    assert found(at=NOW - HOUR / 2) is not None


def test_a_tenants_own_price_takes_precedence(acme):
    publish(price("3"), price("15", C.OUTPUT), at=NOW - 3 * HOUR)
    publish(price("10", C.OUTPUT), tenant=acme, at=NOW - 2 * HOUR)
    assert usd(found(acme.pk)) == {"uncached": "3", "output": "10"}
    assert usd(found(acme.pk + 1)) == {"uncached": "3", "output": "15"}
    publish(price("2"), price("14", C.OUTPUT), at=NOW - HOUR)
    assert usd(found(acme.pk)) == {"uncached": "2", "output": "10"}, "a change of the list reaches who has an own price"
    publish(withdrawn=(("m", Tier.STANDARD),), tenant=acme)
    assert usd(found(acme.pk)) == {"uncached": "2", "output": "14"}


def test_a_later_change_of_the_list_applies_to_tenants(acme):
    publish(price("3"), at=NOW - HOUR)
    publish(price("4"), at=NOW + HOUR)
    publish(price("10", C.OUTPUT), tenant=acme, at=NOW)
    assert usd(found(acme.pk, NOW)) == {"uncached": "3", "output": "10"}
    assert usd(found(acme.pk, NOW + HOUR)) == {"uncached": "4", "output": "10"}


def test_prices_of_a_holiday_are_two_dated_versions(acme):
    """Prices have no calendar: the holiday's version is published first, then the usual prices from its end."""
    zone = ZoneInfo("Asia/Shanghai")
    holiday, end = datetime(2030, 10, 1, tzinfo=zone), datetime(2030, 10, 8, tzinfo=zone)
    workday = {"until_weekday": 5, "time_zone": zone.key}
    usual = [
        price("1", until_minute=9 * 60, **workday),
        price("2", from_minute=9 * 60, until_minute=12 * 60, **workday),
        price("1", from_minute=12 * 60, **workday),
        price("1", from_weekday=5, time_zone=zone.key),
    ]
    publish(*usual)
    publish(price("1"), at=holiday)
    publish(*usual, at=end)
    morning = timedelta(hours=9)
    for moment, expected in (
        (holiday - timedelta(seconds=1) - 12 * HOUR, "2"),  # Monday 30 September, 11:59:59
        (holiday + morning, "1"),  # Tuesday
        (end - timedelta(days=1) + morning, "1"),  # Monday
        (end + morning, "2"),  # Tuesday
        (end + morning - timedelta(seconds=1), "1"),
    ):
        card, at = found(at=moment), round(moment.timestamp() * 10**6)
        assert card is not None
        assert cost_of(card, TokenCounts(uncached=1), at).cost_femto == int(expected) * 10**9, moment
    with pytest.raises(Conflict, match="a later effective date"):
        publish(price("1"), at=holiday - timedelta(days=1))


def test_a_tenant_of_another_price_book_has_only_its_prices(acme):
    publish(price("3"), at=NOW - 2 * HOUR)
    publish(price("1", model="n"), at=NOW - 2 * HOUR)
    publish(price("2"), at=NOW - 2 * HOUR, book="partners")
    do_assign_book(acme, "partners")
    assert usd(found(acme.pk)) == {"uncached": "2"}
    assert found(acme.pk, model="n") is None
    assert usd(found(acme.pk + 1)) == {"uncached": "3"}
    publish(price("1", model="o"))
    assert found(acme.pk, model="o") is None, "a model that is new on the list alone"
    do_assign_book(acme, "list")
    assert usd(found(acme.pk, model="n")) == {"uncached": "1"}
    with pytest.raises(ActionRefused, match="does not exist"):
        do_assign_book(acme, "nowhere")


def test_the_database_rejects_overlapping_prices(acme):
    version = publish(price("3", until_tokens=1000), price("4", from_tokens=1000))
    fields = {"version": version, "book": version.book, "model": "m", "tier": "standard", "component": "uncached"}
    fields |= {"nano_per_million": 1, "effective_from": NOW + HOUR}
    for clash in ({}, {"from_tokens": 999, "until_tokens": 1001}, {"from_minute": 60, "until_minute": 61}):
        with pytest.raises(IntegrityError, match="price_no_overlap"), all_tenants_scope(BypassReason.COMMAND):
            Price.objects.create(**fields | clash)
    for apart in ({"tier": "batch"}, {"component": "output"}, {"model": "n"}, {"tenant_id": acme.pk}):
        with all_tenants_scope(BypassReason.COMMAND):
            Price.objects.create(**fields | apart)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE billing_price SET nano_per_million = 0",
        "UPDATE billing_price SET effective_until = NULL",
        "DELETE FROM billing_price",
        "UPDATE billing_priceversion SET body = '{}'",
        "DELETE FROM billing_priceversion",
        "UPDATE billing_compiledratecard SET rates = ''",
        "DELETE FROM billing_compiledratecard",
    ],
)
def test_published_prices_never_change(as_owner, sql):
    publish(price("3"))
    with pytest.raises(DatabaseError), all_tenants_scope(BypassReason.COMMAND), connection.cursor() as cursor:
        cursor.execute(sql)
    with pytest.raises(IntegrityError), as_owner(), connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
        for table in ("billing_price", "billing_priceversion", "billing_compiledratecard"):
            cursor.execute(f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY")
        cursor.execute(sql)


def test_the_apps_role_reads_list_prices_and_its_tenants_prices(acme):
    other = do_create_tenant("other", "Other")
    publish(price("3"))
    publish(price("2"), tenant=acme)
    with tenant_scope(other):
        assert set(Price.objects.values_list("tenant_id", flat=True)) == {None}
        assert set(CompiledRateCard.objects.values_list("tenant_id", flat=True)) == {None}
        with pytest.raises(DatabaseError, match="permission denied"), transaction.atomic():
            Price.objects.update(effective_until=NOW + HOUR)
    with tenant_scope(acme):
        assert set(Price.objects.values_list("tenant_id", flat=True)) == {None, acme.pk}


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ((), "no price"),
        ((price("1"), price("2")), "overlap"),
        ((price("1", until_tokens=10), price("2", from_tokens=9)), "overlap"),
        ((price("1", from_minute=5, until_minute=5),), "time range"),
        ((price("1", from_tokens=5, until_tokens=5),), "range of prompt lengths"),
        ((price("1", model=""),), "name"),
        ((price("1", model="x" * 129),), "name"),
    ],
)
def test_an_invalid_draft_is_rejected(prices, message):
    with pytest.raises(ActionRefused, match=message):
        do_propose_prices(Proposal(prices))


def test_a_tenants_draft_cannot_price_and_withdraw_the_same_model():
    with pytest.raises(ActionRefused, match="both priced and withdrawn"):
        do_propose_prices(Proposal((price("1"),), (("m", Tier.STANDARD),)))


@pytest.mark.parametrize(
    ("text", "nano"), [("3", 3 * 10**9), ("0.30", 3 * 10**8), ("0.000000001", 1), ("1E+2", 10**11)]
)
def test_decimals_are_exact(text, nano):
    assert nano_per_million(text) == nano


@pytest.mark.parametrize("text", ["", "x", "-1", "0.0000000001", "NaN", "Infinity", "1e30", "1e999999"])
def test_invalid_prices_are_rejected(text):
    with pytest.raises(ValueError):
        nano_per_million(text)


@given(st.integers(0, 10**18))
def test_any_integer_price_is_read_unchanged(nano):
    assert nano_per_million(str(Decimal(nano).scaleb(-9))) == nano


def components(imported, model: str, tier: Tier = Tier.STANDARD) -> dict[tuple[str, int], str]:
    rows = [row for row in imported.prices if (row.model, row.tier) == (model, tier)]
    return {(row.component.value, row.from_tokens): str(Decimal(row.nano_per_million).scaleb(-9)) for row in rows}


def test_the_public_file_is_read_exactly():
    imported = read_public(FILE.read_bytes())
    haiku = {name: Decimal(usd) for (name, _), usd in components(imported, "claude-haiku-4-5-20251001").items()}
    wanted = {"uncached": "1", "cache_read": "0.1", "cache_write_5m": "1.25", "cache_write_1h": "2", "output": "5"}
    assert haiku == {name: Decimal(usd) for name, usd in wanted.items()}
    batch = components(imported, "claude-haiku-4-5-20251001", Tier.BATCH)
    assert batch["uncached", 0] == "0.500000000"
    assert ("cache_write_1h", 0) not in batch, "the file says what a write costs, but not for an hour: no guess"


def test_context_lengths_of_the_public_file_become_bands():
    imported = read_public(FILE.read_bytes())
    sonnet = [
        (row.from_tokens, row.until_tokens, row.nano_per_million)
        for row in imported.prices
        if row.model == "anthropic.claude-sonnet-4-20250514-v1:0" and row.component == C.UNCACHED
    ]
    assert sonnet == [(0, 200_001, 3 * 10**9), (200_001, NO_END, 6 * 10**9)]
    tiered = components(imported, "opencode_go/claude-haiku-5-5")
    assert tiered["output", 0] == "0.500000000"
    assert tiered["output", 100_001] == "2.500000000"


def test_cached_components_without_a_price_cost_the_uncached_price():
    imported = read_public(FILE.read_bytes())
    embedding = components(imported, "text-embedding-3-small")
    assert {embedding[name, 0] for name in ("uncached", "cache_read", "cache_write_5m", "cache_write_1h")} == {
        "0.020000000"
    }


def imported(**fields: Any) -> tuple[dict[tuple[str, str, int], str], list[str]]:
    """Read a file with one model; return its prices by tier, component and length of prompts, and the assumed ones."""
    found = read_public(json.dumps({"m": fields}))
    prices = {
        (row.tier.value, row.component.value, row.from_tokens): f"{Decimal(row.nano_per_million).scaleb(-9):f}"
        for row in found.prices
    }
    return {key: amount.rstrip("0").rstrip(".") for key, amount in prices.items()}, found.assumed


def test_a_tier_without_a_cached_price_has_the_cheaper_of_its_uncached_and_the_standard_cached_price():
    prices, assumed = imported(
        input_cost_per_token=1.25e-6,
        cache_read_input_token_cost=1.25e-7,
        cache_creation_input_token_cost=1.5e-6,
        input_cost_per_token_batches=6.25e-7,
        input_cost_per_token_flex=1e-7,
        input_cost_per_token_priority=2e-6,
    )
    assert {key[0]: amount for key, amount in prices.items() if key[1] == "cache_read"} == {
        **{"standard": "0.125", "batch": "0.125", "flex": "0.1", "priority": "0.125"},
    }
    assert {key[0]: amount for key, amount in prices.items() if key[1] == "cache_write_5m"} == {
        **{"standard": "1.5", "batch": "0.625", "flex": "0.1", "priority": "1.5"},
    }
    assert assumed == [
        "m, batch, cache_read = 0.125 (as cache_read of the standard tier)",
        "m, batch, cache_write_5m = 0.625 (as uncached)",
        "m, flex, cache_read = 0.10 (as uncached)",
        "m, flex, cache_write_5m = 0.10 (as uncached)",
        "m, priority, cache_read = 0.125 (as cache_read of the standard tier)",
        "m, priority, cache_write_5m = 1.50 (as cache_write_5m of the standard tier)",
    ]


def test_what_is_missing_is_decided_by_range_of_prompt_lengths():
    """A cached price for long prompts only left short ones without a price, so that their requests were rejected."""
    prices, assumed = imported(
        input_cost_per_token=1e-6,
        input_cost_per_token_above_200k_tokens=2e-6,
        cache_read_input_token_cost_above_200k_tokens=2e-7,
        cache_creation_input_token_cost=3e-6,
        output_cost_per_token=5e-6,
        input_cost_per_token_batches=5e-7,
        input_cost_per_token_above_200k_tokens_batches=1e-6,
    )
    assert {key: amount for key, amount in prices.items() if key[1] == "cache_read"} == {
        ("standard", "cache_read", 0): "1",
        ("standard", "cache_read", 200_001): "0.2",
        ("batch", "cache_read", 0): "0.5",
        ("batch", "cache_read", 200_001): "0.2",
    }
    assert {key: amount for key, amount in prices.items() if key[1] in ("cache_write_5m", "output")} == {
        ("standard", "cache_write_5m", 0): "3",
        ("standard", "cache_write_5m", 200_001): "2",
        ("standard", "output", 0): "5",
        ("batch", "cache_write_5m", 0): "0.5",
        ("batch", "cache_write_5m", 200_001): "1",
    }
    assert not any(key[1] == "cache_write_1h" for key in prices)
    assert assumed == [
        "m, batch, cache_read = 0.50 (as uncached)",
        "m, batch, cache_read from 200001 tokens = 0.20 (as cache_read of the standard tier)",
        "m, batch, cache_write_5m = 0.50 (as uncached)",
        "m, batch, cache_write_5m from 200001 tokens = 1.00 (as uncached)",
        "m, standard, cache_read = 1.00 (as uncached)",
        "m, standard, cache_write_5m from 200001 tokens = 2.00 (as uncached)",
        "m, standard, output from 200001 tokens = 5.00 (as output of shorter prompts)",
    ]


def test_a_standard_range_that_a_tier_lacks_is_one_of_its_cached_price():
    prices, _ = imported(
        input_cost_per_token=1e-6,
        cache_read_input_token_cost=1e-7,
        cache_read_input_token_cost_above_200k_tokens=3e-7,
        input_cost_per_token_batches=5e-7,
    )
    assert {key[2]: amount for key, amount in prices.items() if key[:2] == ("batch", "cache_read")} == {
        **{0: "0.1", 200_001: "0.3"},
    }


def test_a_complete_file_has_no_assumed_price():
    kinds = ("input_cost_per_token", "cache_read_input_token_cost", "cache_creation_input_token_cost")
    kinds += ("cache_creation_input_token_cost_above_1hr", "output_cost_per_token")
    assert imported(**{f"{kind}{tier}": 1e-6 for kind in kinds for tier in ("", "_batches")})[1] == []


def test_a_left_out_price_is_not_replaced_in_another_range_or_tier():
    prices, assumed = imported(
        input_cost_per_token=1e-6,
        input_cost_per_token_above_200k_tokens=2e-6,
        cache_read_input_token_cost=3.2857142857142855e-8,
        cache_creation_input_token_cost=1e-6,
        input_cost_per_token_batches=5e-7,
    )
    assert not any(key[1] == "cache_read" for key in prices)
    assert not any("cache_read" in text for text in assumed)


def test_fractional_prices_are_left_out_unless_rounding_is_on():
    imported = read_public(FILE.read_bytes())
    model = "bigmodel/glm-5.3-flash"
    assert sorted(line for line in imported.not_whole if line.startswith(model)) == [
        f"{model}: cache_read_input_token_cost = 3.2857142857142855E-8",
        f"{model}: input_cost_per_token = 1.142857142857143E-7",
    ]
    assert ("uncached", 0) not in components(imported, model)
    assert ("cache_read", 0) not in components(imported, model), "nor is it filled with another"
    rounded = components(read_public(FILE.read_bytes(), rounding=True), model)
    assert (rounded["uncached", 0], rounded["cache_read", 0]) == ("0.114285714", "0.032857143")


def test_the_import_reports_what_it_leaves_out():
    imported = read_public(FILE.read_bytes())
    assert imported.unpriced == ["assemblyai/nano"]
    assert imported.other_fields["input_cost_per_second"] == 1
    assert "gemini/gemini-exp-1114" in imported.free


def test_the_public_file_can_be_published():
    publish(*read_public(FILE.read_bytes()).prices)
    rate_card = found(model="gpt-4o")
    assert usd(rate_card)["uncached"] == "2.5"


def test_a_csv_is_read():
    text = "model,tier,component,usd_per_million,from_tokens,until_tokens,from_time,until_time\n"
    text += "m,,uncached,1.25,,200001,,\nm,standard,uncached,2.5,200001,,08:00,24:00\n"
    first, second = read_csv(text.splitlines()).prices
    assert first == NewPrice("m", Tier.STANDARD, C.UNCACHED, 1_250_000_000, 0, 200_001)
    assert second == NewPrice("m", Tier.STANDARD, C.UNCACHED, 2_500_000_000, 200_001, NO_END, 480, 1440)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,tier,component\n", "usd_per_million"),
        ("model,tier,component,usd_per_million,color\n", "color"),
        ("model,tier,component,usd_per_million\nm,,uncached,one\n", "line 2"),
        ("model,tier,component,usd_per_million\nm,,words,1\n", "line 2"),
        ("model,tier,component,usd_per_million,from_time\nm,,uncached,1,25:00\n", "line 2"),
        ("model,tier,component,usd_per_million\nm\n", "line 2"),
        ("", "line 1"),
        ('model,"tier" x\n', "line 1"),
    ],
)
def test_an_invalid_csv_is_rejected(text, message):
    with pytest.raises(ValueError, match=message):
        read_csv(text.splitlines())


@pytest.mark.django_db(transaction=True)
def test_concurrent_publications_number_rate_cards_in_commit_order():
    drafts = [do_propose_prices(Proposal((price(str(n), model=f"m{n}"),))) for n in range(8)]
    seen: list[int] = []
    stop = threading.Event()

    def poll() -> None:
        newest = 0
        while True:
            last = stop.is_set()
            rows = sorted(row.pk for row in unscoped(CompiledRateCard).filter(pk__gt=newest))
            seen.extend(rows)
            newest = max([newest, *rows])
            if last:
                break
        connection.close()

    def put(draft: PriceVersion) -> None:
        do_publish_prices(draft, by=None)
        connection.close()

    reader = threading.Thread(target=poll)
    threads = [threading.Thread(target=put, args=(draft,)) for draft in drafts]
    for thread in (reader, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    reader.join()
    assert seen == sorted(row.pk for row in unscoped(CompiledRateCard).all())
    assert sorted(version.number for version in unscoped(PriceVersion).all()) == list(range(1, 9))
