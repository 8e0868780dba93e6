"""The operators' import of payments: the upload of either format, and the payments to assign."""

from __future__ import annotations

from html import unescape
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from billing.models import BankEntry, Invoice, Payment
from tenants.models import Tenant, User
from tests.support.billing.bank_statements import IBAN, account_of_default_entity, entry, statement
from tests.support.billing.books import OCTOBER, invoiced, price, use
from tests.support.frontend.console import remembered
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
PAGE = "/operator/receivables/"
UPLOAD = f"{PAGE}import"


@pytest.fixture
def operator(db: None) -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("op@example.com"))
    remembered(client.session)
    return client


@pytest.fixture
def invoice(acme: Tenant) -> Invoice:
    account_of_default_entity()
    use(acme, OCTOBER, (price("2"), 10**6))
    return invoiced(acme, OCTOBER)


def read(client: Client, path: str, **headers: str) -> str:
    return unescape(client.get(path, headers=headers).content.decode())


def upload(client: Client, name: str, content: bytes | str, status: int = 303, **headers: str) -> str:
    octets = content.encode() if isinstance(content, str) else content
    response = client.post(UPLOAD, {"file": SimpleUploadedFile(name, octets)}, headers=headers)
    assert response.status_code == status, response.content.decode()[-2000:]
    return unescape(response.content.decode())


def test_either_format_is_uploaded(operator: Client, acme: Tenant, invoice: Invoice) -> None:
    assert 'enctype="multipart/form-data"' in read(operator, UPLOAD)
    upload(operator, "s.xml", statement(entry("1.00", str(invoice.number)), entry("7.00", "Hello", payer="Bolt & Co")))
    shown = read(operator, PAGE)
    assert "1 payment was recorded. 1 payment is to be assigned." in shown
    assert all(word in shown for word in ("Bolt & Co", "Hello", "The payment names no invoice.", IBAN))
    upload(operator, "p.csv", f"reference,amount,received_on,invoice\na,1,2026-11-12,{invoice.number}\n")
    assert "1 payment was recorded." in read(operator, PAGE)
    assert unscoped(Invoice).get(pk=invoice.pk).state == "paid"
    statements = read(operator, f"{PAGE}panels/statements")
    assert "s.xml" in statements and "S-1" in statements


def test_a_bad_file_is_shown_with_its_line(operator: Client, invoice: Invoice) -> None:
    bad = statement(entry("1.00", str(invoice.number)), closing="5.00")
    assert "s.xml, line 4: The opening balance and the entries" in upload(operator, "s.xml", bad, 422)
    assert "p.csv, line 1: The file has no payment." in upload(operator, "p.csv", "reference,amount,received_on\n", 422)
    assert "larger than 5 MB" in upload(operator, "s.xml", b" " * 5_000_001, 422)
    assert operator.post(UPLOAD, {}).status_code == 422
    german = upload(operator, "s.xml", bad, 422, **{"accept-language": "de"})
    assert "s.xml, Zeile 4: Anfangssaldo und Buchungen des Auszugs S-1 ergeben 101.00 USD" in german
    assert not unscoped(Payment).exists()


def test_payments_are_assigned_and_dismissed(operator: Client, acme: Tenant, invoice: Invoice) -> None:
    upload(operator, "s.xml", statement(entry("2.00", "Hello", payer="Bolt"), entry("3.00")))
    first, second = unscoped(BankEntry).order_by("pk")
    assign, dismiss = f"{PAGE}entries/{first.pk}/assign", f"{PAGE}entries/{second.pk}/dismiss"
    assert "$2.00 · 12 Nov 2026 · Bolt · Hello" in read(operator, assign)
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "Enter an invoice number or a tenant."),
        ({"invoice": "INV-1"}, "has no known tenant or invoice"),
    ]
    for fields, text in refused:
        response = operator.post(assign, fields)
        assert (response.status_code, text in unescape(response.content.decode())) == (422, True), fields
    assert operator.post(assign, {"invoice": invoice.number}).status_code == 303
    assert operator.post(dismiss, {"sure": "yes"}).status_code == 303
    assert [row.state for row in unscoped(BankEntry).order_by("pk")] == ["booked", "dismissed"]
    assert [operator.get(path).status_code for path in (assign, dismiss)] == [404, 404]
    assert "Nothing to assign" in read(operator, PAGE)
    assert unscoped(Invoice).get(pk=invoice.pk).state == "paid"
