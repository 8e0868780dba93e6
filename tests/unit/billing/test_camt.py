"""Bank statements in the format camt.053: what is read, and which files are refused with their line."""

from __future__ import annotations

from datetime import date

import pytest

from billing.payments import xml_elements
from billing.payments.camt import is_camt, read_camt
from billing.payments.file_errors import FileRefused
from tests.support.billing.bank_statements import IBAN, details, document, entry, statement, stmt

VERSIONS = ("02", "08")


def refuse(content: bytes) -> tuple[int, str]:
    with pytest.raises(FileRefused) as refused:
        read_camt(content)
    return refused.value.line, str(refused.value)


@pytest.mark.parametrize("version", VERSIONS)
def test_credits_are_payments(version):
    content = statement(
        entry("12.50", "INV-2026-000001", reference="B-1", payer="Acme & Sons"),
        entry("3.00", creditor="RF18INV2026000002"),
        version=version,
    )
    (found,) = read_camt(content)
    assert (found.account, found.statement_id, found.number, found.currency) == (IBAN, "S-1", "7", "USD")
    assert (found.opening, found.closing, found.closes_on) == (10_000, 11_550, date(2026, 11, 12))
    first, second = found.payments
    assert (first.cents, first.payer, first.texts) == (1250, "Acme & Sons", ("INV-2026-000001",))
    assert first.booked_on == date(2026, 11, 12)
    assert (first.reference, second.reference) == (f"{IBAN} B-1", f"{IBAN} S-1/7/2")
    assert second.texts == ("RF18INV2026000002",)


def test_other_entries_are_no_payments():
    content = statement(
        entry("5.00", direction="DBIT"),
        entry("9.00", status="PDNG"),
        entry("2.00", "returned transfer of ours", reversal=True),
        entry("1.00", "INV-2026-000001", direction="DBIT", reversal=True),
        entry("0.00"),
    )
    (found,) = read_camt(content)
    assert [payment.cents for payment in found.payments] == [-100]  # a direct debit that the payer returned
    assert (found.others, found.pending, found.closing) == (3, 1, 10_000 - 500 + 200 - 100)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_batch_is_divided(version):
    parts = [details(f"text {place}", amount=amount) for place, amount in enumerate(("1.00", "2.50"))]
    (found,) = read_camt(statement(entry("3.50", reference="B-1", parts=parts), version=version))
    assert [(each.cents, each.texts, each.reference) for each in found.payments] == [
        (100, ("text 0",), f"{IBAN} B-1/1"),
        (250, ("text 1",), f"{IBAN} B-1/2"),
    ]


def test_a_batch_without_amounts_is_one_payment():
    (found,) = read_camt(statement(entry("3.50", parts=[details("a"), details("b")])))
    assert [(each.cents, each.texts) for each in found.payments] == [(350, ("a", "b"))]


def test_equal_references_of_a_bank_are_different_payments():
    (found,) = read_camt(statement(entry("1.00", reference="B-1"), entry("2.00", reference="B-1")))
    assert [each.reference for each in found.payments] == [f"{IBAN} B-1", f"{IBAN} B-1#2"]


def test_several_statements():
    content = document(stmt(entry("1.00")), stmt(entry("2.00"), statement_id="S-2"), version="08")
    assert [each.payments[0].cents for each in read_camt(content)] == [100, 200]


def test_pages_of_a_statement():
    first, second = (
        stmt(entry(amount), number=f"7</ElctrncSeqNb><StmtPgntn><PgNb>{page}</PgNb></StmtPgntn><ElctrncSeqNb>7")
        for page, amount in enumerate(("1.00", "2.00"), 1)
    )
    middle = document(first.replace("CLBD", "ITBD"), second.replace("OPBD", "ITBD").replace("CLBD", "ITBD"))
    assert [(each.number, each.closing) for each in read_camt(middle)] == [("7/1", 10_100), ("7/2", 10_200)]


def test_amounts_have_the_decimals_of_the_currency():
    (yen,) = read_camt(statement(entry("100.00", currency="JPY"), currency="JPY", opening="7"))
    assert (yen.payments[0].cents, yen.closing) == (100, 107)
    line, message = refuse(statement(entry("1.505"), closing="101.51"))
    assert (line, message) == (10, "'1.505' is no amount in USD.")


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (statement(entry("1.00"), closing="102.00"), 4, "sum to 101.00 USD, not to the closing balance of 102.00 USD"),
        (statement(entry("1.00", currency="EUR"), closing="101.00"), 10, "'EUR' is not the currency of the account"),
        (statement(entry("1.00"), currency="ZZZ"), 7, "The currency 'ZZZ' is not known"),
        (document(stmt(), stmt()), 9, "The statement S-1 is in the file twice (line 4)"),
        (document(), 2, "has no statement"),
        (
            statement(entry("1.00", parts=[details(amount="1"), details(amount="2")])),
            9,
            "details of the entry sum to 3",
        ),
        (statement(entry("1.00", day="2026-13-01")), 9, "'2026-13-01' is not a day"),
        (statement(entry("-1.00"), closing="99.00"), 10, "'-1.00' is no amount"),
        (statement(entry("1.00", direction="BOTH"), closing="101.00"), 9, "'BOTH' is neither CRDT nor DBIT"),
        (statement(iban=""), 4, "has no IBAN"),
        (statement(statement_id=""), 4, "has no identifier"),
        (statement().replace(b"CLBD", b"OTHR"), 4, "lacks its opening or its closing balance"),
        (statement().replace(b"camt.053", b"camt.054"), 2, "not a bank statement in the format camt.053"),
        (b"<html></html>", 1, "not a bank statement"),
        (b"<Document>", 1, "not well-formed"),
        (b'<?xml version="1.0" encoding="none"?><a/>', 1, "encoding"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(content, line, message):
    found = refuse(content)
    assert found[0] == line, found
    assert message in found[1]


@pytest.mark.parametrize(
    "doctype",
    [
        '<!DOCTYPE a [<!ENTITY x "y">]>',
        '<!DOCTYPE a SYSTEM "file:///etc/passwd">',
        '<!DOCTYPE a [<!ENTITY % x SYSTEM "http://127.0.0.1/"> %x;]>',
    ],
)
def test_document_types_are_refused(doctype):
    text = (
        statement(entry("1.00", "text")).decode().replace("<Document", f"{doctype}\n<Document").replace("text", "&x;")
    )
    line, message = refuse(text.encode())
    assert (line, message) == (2, "Remove the document type declaration.")


def test_sizes_are_limited(monkeypatch):
    assert "larger than 5 MB" in refuse(b" " * 5_000_001)[1]
    monkeypatch.setattr(xml_elements, "MAX_ELEMENTS", 20)
    assert "too many elements" in refuse(statement(entry("1.00")))[1]
    monkeypatch.undo()
    assert "too many elements" in refuse(b"<a>" * 50)[1]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "iso-8859-1"])
def test_encodings(encoding):
    text = statement(entry("1.00", "Grüße")).decode().replace('"UTF-8"', f'"{encoding.removesuffix("-sig")}"')
    content = text.encode(encoding)
    assert is_camt(content)
    assert read_camt(content)[0].payments[0].texts == ("Grüße",)
    assert read_camt(text.encode(), "utf-8")[0].payments[0].texts == ("Grüße",)


def test_a_csv_is_recognized():
    assert not is_camt(b"reference,amount,received_on\n")
