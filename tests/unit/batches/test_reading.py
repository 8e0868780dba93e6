"""A batch's input file: its lines and its errors."""

from __future__ import annotations

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.apps.batches import reading
from millrace.apps.batches.reading import BadFile, decode_request, read_lines

URL = "/v1/completions"


def line(custom_id: object = "a", **changes: object) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": URL, "body": {"model": "m"}} | changes)


def errors_of(*lines: str, most: int = 1000) -> list[tuple[str, int | None]]:
    with pytest.raises(BadFile) as exc_info:
        read_lines(io.BytesIO("\n".join(lines).encode()), URL, most)
    return [(error["code"], error["line"]) for error in exc_info.value.errors]


@given(
    st.lists(
        st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1), min_size=1, unique=True
    ),
    st.sampled_from(["\n", "\r\n", "\n\n", " \n\t"]),
)
def test_each_line_has_its_position(names: list[str], between: str) -> None:
    text = between.join(line(name) for name in names).encode()
    found = read_lines(io.BytesIO(text), URL, 100_000)
    assert [each.custom_id for each in found] == names
    assert [each.number for each in found] == list(range(len(names)))
    for each in found:
        request = decode_request(text[each.byte_offset : each.byte_offset + each.size])
        assert request.custom_id == each.custom_id
        assert json.loads(bytes(request.body)) == {"model": "m"}


def test_errors_are_reported_per_line() -> None:
    wrong = [
        ("{", "invalid_json_line"),
        ("[]", "invalid_request"),
        (line(7), "invalid_request"),
        (line(more=1), "invalid_request"),
        (line(""), "invalid_custom_id"),
        (line("x" * 513), "invalid_custom_id"),
        (line("a\0"), "invalid_custom_id"),
        (line("b", method="GET"), "invalid_method"),
        (line("c", url="/v1/embeddings"), "mismatched_url"),
        (line("d", body=[1]), "invalid_body"),
        (line("b"), "duplicate_custom_id"),
    ]
    lines = [line("fine"), *(text for text, _ in wrong)]
    assert errors_of(*lines) == [(code, number) for number, (_, code) in enumerate(wrong, 2)]


def test_a_file_without_requests_is_invalid() -> None:
    assert errors_of("", "  ") == [("empty_file", None)]


def test_a_too_long_line_ends_the_reading() -> None:
    assert errors_of(line("a"), line("b" * 200), line("c"), most=150) == [("request_too_large", 2)]


def test_the_number_of_lines_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_LINES", 3)
    assert len(read_lines(io.BytesIO("\n".join(line(f"n{n}") for n in range(3)).encode()), URL, 1000)) == 3
    assert errors_of(*(line(f"n{n}") for n in range(4))) == [("too_many_requests", 4)]
    monkeypatch.setattr(reading, "MAX_REPORTED_ERRORS", 2)
    assert len(errors_of("{", "{", "{")) == 2
