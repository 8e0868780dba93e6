"""Import of exchange rates: a file of the European Central Bank, or its feed, which is off by default.

The bank publishes rates about 16:00 CET on its working days. `MILLRACE_EXCHANGE_RATES_URL` enables the feed: a task
reads the file of the last 90 days, so that a missed day is filled by the next run.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import date
from typing import NamedTuple

import httpx2
import structlog
from django.conf import settings

from billing.currencies.ecb_rates import DollarRate, read_ecb_rates
from billing.models import ExchangeRate
from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions import ActionRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

log = structlog.get_logger(__name__)
MAX_FEED_BYTES = 2 * 2**20  # the file of 90 days has 0.1 MB
FEED_TIMEOUT_SECONDS = 30  # for the whole file
_BATCH = 5_000


class RateImport(NamedTuple):
    """The result of an import: the new rates, those that were known, and the newest day of the file."""

    new: int
    known: int
    newest_on: date


class FeedFailed(Exception):
    """The feed gave no file of exchange rates."""


def do_import_rates(content: str, since: date | None = None) -> RateImport:
    """Store the exchange rates of a file, from a day on. A rate that is known does not change.

    Raises:
        ActionRefused: it is no such file, or has no rates from that day on.
    """
    try:
        rates = [rate for rate in read_ecb_rates(content) if since is None or rate.on >= since]
    except ValueError as exc:
        raise ActionRefused(Text("content: %(error)s", error=text_of(exc))) from exc
    if not rates:
        raise ActionRefused(
            Text("content: The file has no rates from %(since)s on. Choose an earlier day.", since=since)
        )
    newest = max(rates, key=lambda rate: rate.on)
    with all_tenants_scope(BypassReason.BILLING):
        new = _insert(rates)
        if new:
            row = ExchangeRate.objects.get(currency=newest.currency, on=newest.on)
            after = {"new": new, "first_on": f"{min(rate.on for rate in rates)}", "last_on": f"{newest.on}"}
            audit.record("exchange_rate.imported", row, tenant_id=None, after=after)
    return RateImport(new, len(rates) - new, newest.on)


def _insert(rates: Iterable[DollarRate]) -> int:
    """Insert the rates of days and currencies without one. Return how many are new."""
    rows = {(rate.currency, rate.on): ExchangeRate(**rate._asdict()) for rate in rates}
    before = ExchangeRate.objects.count()
    ExchangeRate.objects.bulk_create(rows.values(), batch_size=_BATCH, ignore_conflicts=True)
    return ExchangeRate.objects.count() - before


def read_feed() -> RateImport | None:
    """Import the rates of the feed. None: it is off or failed. The next run reads it again."""
    url = settings.MILLRACE.exchange_rates_url
    if not url:
        return None
    try:
        return do_import_rates(_fetch(url))
    except (FeedFailed, ActionRefused) as exc:
        log.warning("exchange_rates_failed", error=str(exc))
        return None


def _fetch(url: str) -> str:
    """Return the text at a URL, with limits of size and time. Redirects are not followed.

    Raises:
        FeedFailed: there is none, or it exceeds a limit.
    """
    ends_at, content = time.monotonic() + FEED_TIMEOUT_SECONDS, bytearray()
    try:
        with httpx2.stream("GET", url, timeout=FEED_TIMEOUT_SECONDS) as response:
            if response.status_code != 200:
                raise FeedFailed(f"The server responded with status {response.status_code}.")
            for part in response.iter_bytes():
                content += part
                if len(content) > MAX_FEED_BYTES:
                    raise FeedFailed(f"The file has more than {MAX_FEED_BYTES} bytes.")
                if time.monotonic() > ends_at:
                    raise FeedFailed(f"The file took more than {FEED_TIMEOUT_SECONDS} seconds.")
        return content.decode()
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeDecodeError) as exc:
        raise FeedFailed(str(exc)) from exc
