"""Array parameters of PostgreSQL, compared with the values read back."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.db import connection
from hypothesis import given
from hypothesis import strategies as st

from billing.db_arrays import array, text_array

pytestmark = pytest.mark.django_db
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=12)
ODD = st.sampled_from(['a"b', "a\\b", "a\nb", "{}", "NULL", "null", "", " ", ",", "\x7f", "\u2028", "😀"])


def read(kind: str, words: str) -> list[object]:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT %s::{kind}[]", [words])
        found: list[object] = cursor.fetchone()[0]
        return found


@given(st.lists(st.none() | TEXTS | ODD, max_size=8))
def test_texts(values: list[str | None]) -> None:
    assert read("text", text_array(values)) == values


@given(st.lists(st.none() | st.integers(-(10**30), 10**30), max_size=8))
def test_numbers(values: list[int | None]) -> None:
    assert read("numeric", array(values)) == values


@given(st.lists(st.none() | st.datetimes(timezones=st.just(UTC)), max_size=8))
def test_times(values: list[datetime | None]) -> None:
    assert read("timestamptz", array(values)) == values
