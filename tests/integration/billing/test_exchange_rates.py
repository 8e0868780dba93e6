"""Exchange rates: the age that a tax currency allows, files of the European Central Bank, and its feed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from billing.invoicing.corrections import do_issue_credit_note
from billing.invoicing.document import describe_invoice, in_words
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.exports import html
from billing.invoicing.finalizing import do_finalize
from billing.invoicing.runs import invoice_months
from billing.invoicing.setup import do_change_entity
from billing.invoicing.tax_rates import find_problem
from billing.models import ExchangeRate, Invoice, InvoiceRunFailure, NumberSeries
from billing.periods import default_entity
from billing.pricing import exchange_rates
from billing.pricing.currencies import dated_rate
from billing.pricing.exchange_rates import do_import_rates
from billing.tasks import read_exchange_rates
from tenants.actions import ActionRefused, Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry, Tenant
from tests.support.billing.books import OCTOBER, over, period, price, use
from tests.support.billing.euros import bill_in_euros
from tests.support.billing.invoice_forms import attached, document_of, failed_rules, furnish
from tests.support.imports import ROOT
from tests.support.rows import unscoped
from tests.support.tenants.concurrency import at_once

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
FILES = ROOT / "tests" / "data" / "exchange_rates"
XML = (FILES / "eurofxref-hist-90d.xml").read_text(encoding="utf-8")
CSV = (FILES / "eurofxref-hist.csv").read_text(encoding="utf-8")
ISSUED = datetime(2026, 11, 1, 1, tzinfo=UTC)  # a Sunday: the newest rate is of Friday


@pytest.fixture
def draft(acme: Tenant) -> Invoice:
    """A draft of 119.00 USD whose tax is also due in EUR."""
    furnish(acme, "S", 190_000)
    with all_tenants_scope(BypassReason.BILLING):
        do_change_entity(default_entity(), tax_currency="EUR")
    use(acme, OCTOBER, (price("100"), 10**6))
    month = period(OCTOBER)
    do_close_period(month, now=over(month))
    (found,) = do_draft(month, acme)
    return found


def add_rate(on: date, micro: int = 900_000) -> None:
    with all_tenants_scope(BypassReason.BILLING):
        ExchangeRate.objects.create(currency="EUR", on=on, micro_per_usd=micro)


def problem_of(draft: Invoice) -> str:
    with all_tenants_scope(BypassReason.BILLING):
        return find_problem(Invoice.objects.all_tenants().select_related("entity", "period").get(pk=draft.pk), ISSUED)


def stored() -> dict[tuple[str, str], int]:
    return {(row.currency, f"{row.on}"): row.micro_per_usd for row in unscoped(ExchangeRate).all()}


def test_a_rate_of_seven_years_ago_is_refused(acme, draft):
    add_rate(date(2019, 11, 1))
    message = "The newest exchange rate of EUR, the tax currency, is of 2019-11-01."
    assert problem_of(draft).startswith(message)
    with pytest.raises(Conflict, match=r"It may be 7 days old\. Import a newer one"):
        do_finalize(draft, ISSUED)
    row = unscoped(Invoice).get()
    assert (row.state, row.number, unscoped(NumberSeries).count()) == ("draft", None, 0)
    invoice_months(month="2026-10", now=over(period(OCTOBER)))
    assert unscoped(InvoiceRunFailure).get().reason.startswith(message)
    do_import_rates(CSV)
    assert problem_of(draft) == ""
    assert do_finalize(draft, ISSUED).number


def test_a_draft_without_a_rate_or_a_tax_rule_shows_why(acme, draft):
    assert problem_of(draft) == "There is no exchange rate of EUR, the tax currency. Add one for 2026-11-01 or before."
    with all_tenants_scope(BypassReason.BILLING):
        default_entity().taxrule_set.update(country="FR")
    assert problem_of(draft) == "No tax rule for a business in DE on 2026-10-31."


def test_a_draft_with_prices_of_another_currency_shows_why(acme: Tenant) -> None:
    """The tenant was assigned to a price book in EUR while a request ran, whose usage was settled afterwards."""
    used = price("100")
    bill_in_euros(acme)
    use(acme, OCTOBER, (used, 10**6))
    month = period(OCTOBER)
    do_close_period(month, now=over(month))
    (draft,) = do_draft(month, acme)
    message = "Usage of alpha has a price in another currency than EUR."
    assert problem_of(draft) == message
    with pytest.raises(Conflict, match=message):
        do_finalize(draft, ISSUED)


@pytest.mark.parametrize(("days", "on", "is_used"), [(7, 25, True), (7, 24, False), (1, 31, True), (1, 30, False)])
def test_the_entity_limits_the_age(acme, draft, days, on, is_used):
    with all_tenants_scope(BypassReason.BILLING):
        do_change_entity(default_entity(), max_rate_age_days=days)
    add_rate(date(2026, 10, on))
    assert (problem_of(draft) == "") == is_used
    if is_used:
        assert do_finalize(draft, ISSUED).tax_rate_on == date(2026, 10, on)
    else:
        with pytest.raises(Conflict, match="Import a newer one"):
            do_finalize(draft, ISSUED)


def test_the_older_of_two_rates_counts(acme, draft):
    """The rate of EUR per GBP is computed from two rates per dollar."""
    add_rate(date(2026, 10, 30))
    with all_tenants_scope(BypassReason.BILLING):
        ExchangeRate.objects.create(currency="GBP", on=date(2026, 3, 1), micro_per_usd=750_000)
        found = dated_rate("GBP", "EUR", date(2026, 11, 1))
        assert dated_rate("USD", "USD", date(2026, 11, 1)).on == date(2026, 11, 1)
    assert (found.rate.units, found.on) == (1_200_000, date(2026, 3, 1))


def test_documents_name_the_day_of_the_rate(acme, draft):
    add_rate(date(2026, 10, 30))
    invoice = do_finalize(draft, ISSUED)
    add_rate(date(2026, 11, 20), 500_000)
    note = do_issue_credit_note(invoice, [("SLA", 5_000)], "SLA")
    for row, amount in ((invoice, "17.10"), (note, "8.55")):
        shown = document_of(row)
        assert shown["tax_currency"]["rate_on"] == "2026-10-30"
        words = f"Tax in EUR: {amount}, at 0.90 per USD of 30 October 2026."
        assert words in html(shown)
        _, xml = attached(row)
        assert f"<ram:Content>{words}</ram:Content>".encode() in xml
        assert failed_rules(xml) == []


def test_a_document_of_an_earlier_release_has_no_day(acme, draft):
    add_rate(date(2026, 10, 30))
    invoice = do_finalize(draft, ISSUED)
    invoice.tax_rate_on = None
    with all_tenants_scope(BypassReason.BILLING):
        shown = describe_invoice(invoice, [])
    assert "rate_on" not in shown["tax_currency"]
    assert in_words(shown)["tax_currency"] == "Tax in EUR: 17.10, at 0.90 per USD."


@pytest.mark.parametrize("content", [XML, CSV, "\ufeff" + CSV.replace("\n", "\r\n")])
def test_a_file_of_the_european_central_bank_is_imported(db, content):
    found = do_import_rates(content)
    assert found == (6, 0, date(2026, 10, 30))
    assert stored() == {
        ("EUR", "2026-10-30"): 800_000,
        ("JPY", "2026-10-30"): 150_000_000,
        ("GBP", "2026-10-30"): 700_000,
        ("EUR", "2026-10-29"): 862_069,
        ("JPY", "2026-10-29"): 153_465_517,
        ("GBP", "2026-10-29"): 758_776,
    }
    assert do_import_rates(content) == (0, 6, date(2026, 10, 30))
    (entry,) = unscoped(AuditEntry).filter(action="exchange_rate.imported")
    assert entry.after == {"new": 6, "first_on": "2026-10-29", "last_on": "2026-10-30"}


def test_a_known_rate_does_not_change(db):
    add_rate(date(2026, 10, 30), 123_456)
    assert do_import_rates(CSV, since=date(2026, 10, 30)) == (2, 1, date(2026, 10, 30))
    assert stored()["EUR", "2026-10-30"] == 123_456


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "line 1: The columns Date and USD are missing"),
        ("<html></html>", "The file has no exchange rates"),
        ("Date,USD,\n", "The file has no exchange rates"),
        ("Date,JPY,\n2026-10-30,187.5,\n", "line 1: The columns Date and USD are missing"),
        (CSV.replace("2026-10-29", "yesterday"), "line 3: 'yesterday' is not a day"),
        (CSV.replace("1.1600", "N/A"), "line 3: '' is not a rate of USD"),
        (CSV.replace("178.02", "-1"), "line 3: '-1' is not a rate of JPY"),
        (CSV.replace("178.02", "NaN"), "line 3: 'NaN' is not a rate of JPY"),
        (XML.replace("178.02", "1e9"), "line 2: '1e9' is not a rate of JPY"),
        (XML.replace('time="2026-10-29"', 'time="x"'), "line 2: 'x' is not a day"),
        (XML.replace('<Cube time="2026-10-30">', ""), "line 1: The rate of USD belongs to no day"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(db, content, message):
    with pytest.raises(ActionRefused) as refused:
        do_import_rates(content)
    assert message in str(refused.value)
    assert stored() == {}


def test_a_file_without_new_days_is_refused(db):
    with pytest.raises(ActionRefused, match="no rates from 2026-11-01 on"):
        do_import_rates(CSV, since=date(2026, 11, 1))


def test_concurrent_imports_store_each_rate_once(table):
    at_once(*[lambda: do_import_rates(CSV)] * 4)
    assert len(unscoped(ExchangeRate).all()) == len(stored()) == 6


class Feed:
    """A server of a stored file. `pause` is the time between its parts."""

    def __init__(self) -> None:
        self.parts, self.status, self.pause, self.requests = [XML.encode()], 200, 0.0, 0


@pytest.fixture
def feed(settings: Any) -> Iterator[Feed]:
    found = Feed()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found.requests += 1
            self.send_response(found.status)
            if found.status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            for part in found.parts:
                try:
                    self.wfile.write(part)
                    self.wfile.flush()
                except OSError:
                    return
                time.sleep(found.pause)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/eurofxref-hist-90d.xml"
    settings.MILLRACE = replace(settings.MILLRACE, exchange_rates_url=url)
    yield found
    server.shutdown()
    server.server_close()


def test_the_feed_is_off_by_default(db, settings):
    assert settings.MILLRACE.exchange_rates_url == ""
    assert (read_exchange_rates(), stored()) == (0, {})


def test_the_feed_is_imported(db, feed):
    assert (read_exchange_rates(), read_exchange_rates(), feed.requests) == (6, 0, 2)
    assert stored()["EUR", "2026-10-30"] == 800_000


@pytest.mark.parametrize("fault", ["status", "redirect", "size", "time", "content", "text"])
def test_a_feed_that_fails_changes_nothing(db, feed, monkeypatch, fault):
    if fault in ("status", "redirect"):
        feed.status = 503 if fault == "status" else 302
    elif fault == "size":
        monkeypatch.setattr(exchange_rates, "MAX_FEED_BYTES", len(XML) - 1)
    elif fault == "time":
        monkeypatch.setattr(exchange_rates, "FEED_TIMEOUT_SECONDS", 0.3)
        feed.parts, feed.pause = [XML[:100].encode(), *[b" "] * 20], 0.1
    else:
        feed.parts = [b"<html>" if fault == "content" else b"\xff\xfe"]
    started = time.monotonic()
    assert (read_exchange_rates(), stored(), feed.requests) == (0, {}, 1)
    assert time.monotonic() - started < 10


def test_an_unreachable_feed_changes_nothing(db, settings):
    settings.MILLRACE = replace(settings.MILLRACE, exchange_rates_url="http://127.0.0.1:9/rates.xml")
    assert (read_exchange_rates(), stored()) == (0, {})
