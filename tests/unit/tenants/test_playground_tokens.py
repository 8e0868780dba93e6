"""Signature, contents and lifetime of playground tokens."""

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


def test_a_token_contains_its_key_tenant_and_user():
    token = playground_tokens.read(SECRET, give())
    assert token is not None
    assert (token.key_id, token.tenant_id, token.user_id) == (7, 3, 5)
    assert token.name != playground_tokens.read(SECRET, give()).name


def test_a_token_must_be_used_within_a_minute_and_expires_after_15():
    token = playground_tokens.read(SECRET, give())
    within, lasts = playground_tokens.TAKEN_WITHIN, playground_tokens.LASTS
    assert token.may_be_taken(micro(NOW + within) - 1) and not token.may_be_taken(micro(NOW + within))
    assert not token.may_be_taken(micro(NOW - timedelta(minutes=1)))
    assert token.holds(micro(NOW + lasts) - 1) and not token.holds(micro(NOW + lasts))


def test_a_signature_by_another_secret_is_rejected():
    assert playground_tokens.read("t" * 48, give()) is None


@given(st.integers(0, 400), st.integers(1, 255))
def test_a_token_with_a_changed_byte_is_rejected(place, change):
    text = give()
    data = bytearray(text.encode())
    data[place % len(data)] ^= change
    changed = data.decode("latin-1")
    token = playground_tokens.read(SECRET, changed)
    assert token is None or token == playground_tokens.read(SECRET, text)  # base64 has unused bits


@given(st.text())
def test_any_other_text_is_rejected(text):
    assert playground_tokens.read(SECRET, text) is None
