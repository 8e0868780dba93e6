"""Tickets: signed, short-lived, for one key, and given to people who may use it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from tenants.keys import playground_tokens

SECRET = "s" * 48
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def give(**changes: int) -> str:
    return playground_tokens.give(SECRET, **({"key_id": 7, "tenant_id": 3, "user_id": 5} | changes), now=NOW)


def micro(at: datetime) -> int:
    return int(at.timestamp() * 1_000_000)


def test_it_says_what_it_is_for():
    ticket = playground_tokens.read(SECRET, give())
    assert ticket is not None
    assert (ticket.key_id, ticket.tenant_id, ticket.user_id) == (7, 3, 5)
    assert ticket.name != playground_tokens.read(SECRET, give()).name


def test_it_holds_for_some_minutes_and_is_taken_within_one():
    ticket = playground_tokens.read(SECRET, give())
    within, lasts = playground_tokens.TAKEN_WITHIN, playground_tokens.LASTS
    assert ticket.may_be_taken(micro(NOW + within) - 1) and not ticket.may_be_taken(micro(NOW + within))
    assert not ticket.may_be_taken(micro(NOW - timedelta(minutes=1)))
    assert ticket.holds(micro(NOW + lasts) - 1) and not ticket.holds(micro(NOW + lasts))


def test_it_is_signed():
    assert playground_tokens.read("t" * 48, give()) is None


@given(st.integers(0, 400), st.integers(1, 255))
def test_no_changed_byte_goes_through(place, change):
    text = give()
    bad = bytearray(text.encode())
    bad[place % len(bad)] ^= change
    changed = bad.decode("latin-1")
    found = playground_tokens.read(SECRET, changed)
    assert found is None or found == playground_tokens.read(SECRET, text)  # base64 has bits that say nothing


@given(st.text())
def test_any_other_text_is_none(text):
    assert playground_tokens.read(SECRET, text) is None
