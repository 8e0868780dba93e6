"""The rules of `Idempotency-Key` that both APIs use."""

from __future__ import annotations

import pytest

from tenants.idempotency_rules import MAX_KEY_LENGTH, fingerprint, is_valid_key


@pytest.mark.parametrize("key", ["x", b"x", "x" * MAX_KEY_LENGTH, b"x" * MAX_KEY_LENGTH])
def test_valid_keys(key: str | bytes) -> None:
    assert is_valid_key(key)


@pytest.mark.parametrize("key", ["", b"", "x" * (MAX_KEY_LENGTH + 1), b"x" * (MAX_KEY_LENGTH + 1)])
def test_invalid_keys(key: str | bytes) -> None:
    assert not is_valid_key(key)


def test_the_fingerprint_is_of_the_target_and_the_body() -> None:
    first = fingerprint("/v1/completions", b"{}")
    assert first == fingerprint("/v1/completions", b"{}")
    others = {fingerprint("/v1/completions", b"{} "), fingerprint("/v1/completion", b"s{}"), fingerprint("", b"{}")}
    assert first not in others
    assert len(others) == 3
