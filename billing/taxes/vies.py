"""Checks of EU VAT IDs with VIES, the register of the European Commission.

`MILLRACE_VIES_URL` enables the checks. Reverse charge then requires a buyer whose VAT ID was valid at the newest check.
VIES is often unavailable, so a job checks the VAT IDs of profiles before they are needed.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Protocol

import httpx2
import msgspec
import structlog
from django.conf import settings

from billing.currencies.iso_codes import EU_COUNTRIES
from billing.models import BillingProfile, VatCheck
from billing.taxes import vat_ids
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

log = structlog.get_logger(__name__)
MAX_AGE = timedelta(days=30)
TIMEOUT_SECONDS = 15


class ViesResult(NamedTuple):
    """The answer of VIES about a VAT ID."""

    is_valid: bool
    name: str = ""


class Unavailable(Exception):
    """VIES gave no answer. The VAT ID may be valid or not."""


class VatRegister(Protocol):
    """A register of VAT IDs."""

    def check(self, vat_id: str) -> ViesResult:
        """Return whether a VAT ID with the prefix of its country is valid.

        Raises:
            Unavailable: there is no answer.
        """
        ...


class _Answer(msgspec.Struct):
    valid: bool | None = None  # None: an error
    name: str | None = None


class Vies:
    """VIES by its REST API."""

    def __init__(self, url: str) -> None:
        self._url = url

    def check(self, vat_id: str) -> ViesResult:
        asked = {"countryCode": vat_id[:2], "vatNumber": vat_id[2:]}
        try:
            response = httpx2.post(self._url, json=asked, timeout=TIMEOUT_SECONDS)
            answer = msgspec.json.decode(response.content, type=_Answer)
        except (httpx2.HTTPError, msgspec.MsgspecError) as exc:
            raise Unavailable(str(exc)) from exc
        if response.status_code != 200 or answer.valid is None:
            raise Unavailable(f"VIES answered with status {response.status_code}")
        name = answer.name or ""
        return ViesResult(answer.valid, "" if name == "---" else name)


def is_enabled() -> bool:
    """Return whether VAT IDs are checked with VIES."""
    return bool(settings.MILLRACE.vies_url)


def newest_check(vat_id: str) -> VatCheck | None:
    """Return the newest check of a VAT ID."""
    return VatCheck.objects.filter(vat_id=vat_ids.compact(vat_id)).order_by("-pk").first()


def check_profiles(register: VatRegister | None = None, now: datetime | None = None) -> int:
    """Check the EU VAT IDs of billing profiles that were not checked recently. Return how many have an answer."""
    if register is None:
        if not is_enabled():
            return 0
        register = Vies(settings.MILLRACE.vies_url)
    now = now or datetime.now(UTC)
    with all_tenants_scope(BypassReason.BILLING):
        profiles = BillingProfile.objects.all_tenants().filter(country__in=EU_COUNTRIES).exclude(vat_id="")
        wanted = {vat_ids.compact(vat_id) for vat_id in profiles.values_list("vat_id", flat=True)}
        recent = VatCheck.objects.filter(vat_id__in=wanted, checked_at__gt=now - MAX_AGE)
        wanted -= set(recent.values_list("vat_id", flat=True))
    answered = 0
    for vat_id in sorted(wanted):
        try:
            result = register.check(vat_id)
        except Unavailable as exc:
            log.warning("vies_unavailable", vat_id=vat_id, error=str(exc))
            continue
        with all_tenants_scope(BypassReason.BILLING):
            VatCheck.objects.create(vat_id=vat_id, is_valid=result.is_valid, name=result.name[:200], checked_at=now)
        answered += 1
    return answered
