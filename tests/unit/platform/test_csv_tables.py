"""`tenants.csv_tables`: CSV that is safe in spreadsheets, and no other use of the csv module."""

from __future__ import annotations

import csv
import io
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenants import csv_tables
from tests.support.imports import PACKAGES, ROOT, imports, within

FORMULAS = [
    *("=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\tharmless", "\rharmless"),
    *("＝1+1", "＋1+1", "－1+1", "＠SUM(A1)", "﹢1", "﹣1", "﹦1", "﹫a", "⁺1", "₌1", "−1+1"),
    *(" =1+1", "\u00a0=1+1", "\u3000＝1", "\ufeff=1", "\u200b=1", "\0=1", "'=1+1", "''=1+1"),
    *("-", "--1", "+1", "-1e5", "-1,5", "-٣", "-1\n"),
]
HARMLESS = ["acme", "1", "-1", "-0.50", "1-1", "a=b", "O'Neill", "'quoted'", "", "smollm2-135m", "3 - 2"]


def cells(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text, newline="")))


@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_becomes_text_in_every_cell(text: str) -> None:
    assert csv_tables.guard_cell(text) == f"'{text}"
    assert cells(csv_tables.as_csv([text, "b"], [["x", text]])) == [[f"'{text}", "b"], ["x", f"'{text}"]]


@pytest.mark.parametrize("text", HARMLESS)
def test_other_texts_are_unchanged(text: str) -> None:
    assert csv_tables.guard_cell(text) == text
    assert cells(csv_tables.as_csv(["a", "b"], [[text, "x"]]))[1] == [text, "x"]


def test_numbers_are_unchanged() -> None:
    row = [-5, 5, 2.5, Decimal("-0.10"), "-0.000000000000007", None]
    assert csv_tables.as_csv(["n"], [row]) == "n\r\n-5,5,2.5,-0.10,-0.000000000000007,\r\n"


def test_separators_and_line_breaks_are_quoted() -> None:
    written = csv_tables.as_csv(["a"], [["x\ny"], ["x\r=1"], ["x;=1+1"], ["x\t=1"], ['say "so", twice'], [""]])
    assert written == (
        'a\r\n"x\ny"\r\n"x\r=1"\r\n"x;=1+1"\r\n"x\t=1"\r\n"say ""so"", twice"\r\n""\r\n'
    )  # fmt: skip
    for separator in (",", ";", "\t"):  # read with the separator of other locales
        read = csv.reader(io.StringIO(written, newline=""), delimiter=separator)
        assert not [cell for row in read for cell in row if cell.startswith("=")]


@given(st.lists(st.lists(st.text(), min_size=2, max_size=4), min_size=1, max_size=4))
def test_written_tables_are_read_unchanged(table: list[list[str]]) -> None:
    read = cells(csv_tables.as_csv(table[0], table[1:]))
    assert [[csv_tables.unguard_cell(cell) for cell in row] for row in read] == table


def test_no_other_module_uses_csv() -> None:
    folders = [ROOT / name for name in PACKAGES if name != "millrace"] + [ROOT / "platform" / "millrace"]
    found = [where for folder in folders for where, name in imports(folder, "csv") if within(name, {"csv"})]
    assert [where.partition(":")[0] for where in found] == ["tenants/csv_tables.py"]
