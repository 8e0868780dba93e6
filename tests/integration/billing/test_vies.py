"""VIES: the checks of VAT IDs, their results in the database, and reverse charge that requires them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.finalizing import do_finalize
from billing.models import BillingProfile, NumberSeries, VatCheck
from billing.taxes import vies
from tenants.actions import Conflict
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import Tenant
from tests.support.billing.books import OCTOBER, over, period, price, use
from tests.support.billing.invoice_forms import furnish
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
NOW = datetime(2026, 11, 1, tzinfo=UTC)
# Answers in the format of VIES's REST API: a valid VAT ID, one that is not valid, and a country that does not answer.
VALID = {"countryCode": "DE", "vatNumber": "136695976", "requestDate": "2026-11-01T10:00:00.000Z", "valid": True,
         "requestIdentifier": "", "name": "---", "address": "---"}  # fmt: skip
INVALID = VALID | {"valid": False}
UNAVAILABLE = {"actionSucceed": False, "errorWrappers": [{"error": "MS_UNAVAILABLE"}]}


class RecordedVies:
    """A server with recorded answers of VIES."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] = VALID
        self.status = 200
        self.requests: list[dict[str, str]] = []


@pytest.fixture
def recorded(settings) -> Iterator[RecordedVies]:
    found = RecordedVies()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            content = json.dumps(found.answer).encode()
            self.send_response(found.status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/check-vat-number"
    settings.MILLRACE = replace(settings.MILLRACE, vies_url=url)
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    furnish(acme)  # reverse charge for DE136695976
    return acme


def checks() -> list[tuple[str, bool]]:
    return [(row.vat_id, row.is_valid) for row in sorted(unscoped(VatCheck).all(), key=lambda row: row.pk)]


def test_reverse_charge_requires_the_confirmation_of_vies(acme, recorded):
    use(acme, OCTOBER, (price("3"), 10**6))
    month = period(OCTOBER)
    do_close_period(month, now=over(month))
    (draft,) = do_draft(month, acme)
    with pytest.raises(Conflict, match="has not confirmed"):
        do_finalize(draft)
    recorded.answer = INVALID
    assert vies.check_profiles(now=NOW - timedelta(days=31)) == 1
    with pytest.raises(Conflict, match="reported on 2026-10-01 that the VAT ID DE136695976 is not valid"):
        do_finalize(draft)
    assert not NumberSeries.objects.exists()  # refused before it took a number
    recorded.answer = VALID
    assert vies.check_profiles(now=NOW) == 1
    assert do_finalize(draft).taxes[0]["category"] == "AE"
    assert recorded.requests == [{"countryCode": "DE", "vatNumber": "136695976"}] * 2
    assert checks() == [("DE136695976", False), ("DE136695976", True)]


def test_a_check_without_an_answer_is_repeated(acme, recorded):
    for recorded.answer, recorded.status in (
        (UNAVAILABLE, 200),
        (UNAVAILABLE, 500),
        ({"valid": "yes"}, 200),
        (VALID, 503),
    ):
        assert vies.check_profiles(now=NOW) == 0
    assert checks() == []
    recorded.answer, recorded.status = VALID, 200
    assert [vies.check_profiles(now=NOW + timedelta(days=days)) for days in (0, 29, 31)] == [1, 0, 1]


def test_only_eu_vat_ids_are_checked_and_only_if_enabled(acme, recorded, settings):
    with all_tenants_scope(BypassReason.BILLING):
        BillingProfile.objects.all_tenants().update(country="GB", vat_id="GB980780684")
    assert (vies.check_profiles(), recorded.requests) == (0, [])
    with all_tenants_scope(BypassReason.BILLING):
        BillingProfile.objects.all_tenants().update(country="DE", vat_id="DE 136.695.976")
    settings.MILLRACE = replace(settings.MILLRACE, vies_url="")
    assert (vies.check_profiles(), recorded.requests) == (0, [])


def test_the_register_is_an_interface(acme):
    class Known:
        def check(self, vat_id: str) -> vies.ViesResult:
            return vies.ViesResult(vat_id == "DE136695976", "Müller GmbH")

    assert vies.check_profiles(Known()) == 1
    assert unscoped(VatCheck).get().name == "Müller GmbH"
