"""Columns with texts: what they contain, and what they read as."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from inference_worker.contract.texts import Text
from tenants.migration_operations import store_texts
from tenants.text_field import MAX_VALUE_LENGTH, decode_text, encode_text

AT = datetime(2026, 11, 24, 11, 14, tzinfo=UTC)
ROWS = "%(number)s row of %(name)s"


@pytest.mark.parametrize(
    "text",
    [
        Text("Enter a reason."),
        Text(
            "%(title)s (since %(at)s)",
            title=Text(ROWS, "%(number)s rows of %(name)s", number=3, name="x"),
            at=AT,
        ),
        Text("%(share)s of 5%%: %(path)s", share="1.5%", path="/tmp/ä"),
    ],
)
def test_a_text_is_read_as_it_was_stored(text: Text) -> None:
    found = decode_text(encode_text(text))
    assert isinstance(found, Text)
    assert (found, found.message, found.plural, found.values) == (text, text.message, text.plural, text.values)


@pytest.mark.parametrize("text", ["", "Anything of an upstream: 5%", '{"text": "not one of ours"}', '{"text":'])
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert decode_text(encode_text(text)) == text


@pytest.mark.parametrize("stored", ['{"text":', '{"text": 1}', '{"text": "%(n)s", "values": {}}', '{"text": "a"}'])
def test_content_that_is_no_text_is_read_unchanged(stored: str) -> None:
    assert decode_text(stored) == stored


def test_values_are_bounded() -> None:
    long = 10 * MAX_VALUE_LENGTH * "x"
    assert encode_text(long) == long[:MAX_VALUE_LENGTH]
    assert str(decode_text(encode_text(Text("%(error)s.", error=long)))) == f"{long[:MAX_VALUE_LENGTH]}."


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (
            "No delivery for 3 days. Gone: 5%",
            Text("No delivery for %(days)s days. %(error)s", days=3, error="Gone: 5%"),
        ),
        ("1 row of x", Text(ROWS, "%(number)s rows of %(name)s", number=1, name="x")),
        ("1,234 rows of x", Text(ROWS, "%(number)s rows of %(name)s", number=1234, name="x")),
    ],
)
def test_a_migration_finds_the_sentence_of_a_stored_text(stored: str, expected: Text) -> None:
    columns = _StoredColumn([(1, stored), (2, "Anything else.")])
    sentences = ["No delivery for %(days)s days. %(error)s", (ROWS, "%(number)s rows of %(name)s")]
    operation = store_texts({("table", "error"): 12}, sentences)
    operation.code(None, columns)
    found = decode_text(columns.rows[1])
    assert isinstance(found, Text)
    assert (found, found.message, found.values) == (expected, expected.message, expected.values)
    assert columns.rows[2] == "Anything else."
    assert operation.reverse_code is not None
    operation.reverse_code(None, columns)
    assert columns.rows == {1: stored[:12], 2: "Anything els"}


class _StoredColumn:
    """A column of a table, instead of a schema editor and its cursor."""

    def __init__(self, rows: list[tuple[int, str]]) -> None:
        self.rows = dict(rows)
        self.connection = self
        self._found: list[tuple[int, str]] = []

    def cursor(self) -> _StoredColumn:
        return self

    def __enter__(self) -> _StoredColumn:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def execute(self, sql: str, values: tuple[int] = (0,)) -> None:
        self._found = [row for row in self.rows.items() if row[0] > values[0]]

    def fetchall(self) -> list[tuple[int, str]]:
        return self._found

    def executemany(self, sql: str, values: list[tuple[str, int]]) -> None:
        self.rows |= {pk: text for text, pk in values}
