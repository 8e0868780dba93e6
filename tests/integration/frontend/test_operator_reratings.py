"""The operators' re-ratings: a draft by one operator, its change of each invoice, and the approval by another."""

from __future__ import annotations

from html import unescape
from typing import Any

import pytest
from django.test import Client

from billing.invoicing.reratings import continue_reratings
from billing.models import Invoice, Rerating
from tenants.models import User
from tests.support.billing.books import OCTOBER, invoiced, make_months, price, use
from tests.support.frontend.billing_run import make_billed_acme
from tests.support.frontend.console import PASSWORD, remembered
from tests.support.rows import unscoped

FIELDS = {
    "text": "model,tier,component,usd_per_million\nre,standard,uncached,4\n",
    "since": "2026-10-01",
    "until": "2026-11-01",
    "note": "Typing error",
}


def logged_in(email: str) -> Client:
    client = Client()
    client.force_login(User.objects.get(email=email))
    remembered(client.session)
    return client


def page(client: Client, path: str, status: int = 200, **fields: Any) -> str:
    response = client.post(path, fields) if fields else client.get(path)
    assert response.status_code == status, unescape(response.content.decode())[-3000:]
    return unescape(response.content.decode())


@pytest.mark.django_db
def test_a_second_operator_applies_a_re_rating() -> None:
    tenant = make_billed_acme()
    User.objects.create_superuser("second@example.com", PASSWORD)
    make_months()
    use(tenant, OCTOBER, (price("10", model="re"), 10**6))
    invoice = invoiced(tenant, OCTOBER)
    author, other, owner = (logged_in(f"{name}@example.com") for name in ("op", "second", "owner"))
    assert "line 3" in page(author, "/operator/reratings/new", 422, **FIELDS | {"text": FIELDS["text"] + "x,y"})
    assert "after the first" in page(author, "/operator/reratings/new", 422, **FIELDS | {"until": "2026-09-01"})
    page(author, "/operator/reratings/new", 303, **FIELDS)
    (row,) = unscoped(Rerating).all()
    path = f"/operator/reratings/{row.pk}"
    assert "Typing error" in page(author, "/operator/reratings/")
    assert "You created this draft" in page(author, f"{path}/")
    changes = page(other, f"{path}/panels/changes")
    assert invoice.number in changes and "Not issued" in changes
    assert "someone other" in page(author, f"{path}/apply", 422, typed=str(row.pk))
    assert owner.get(f"{path}/").status_code == owner.get("/operator/reratings/").status_code == 404
    page(other, f"{path}/apply", 303, typed=str(row.pk))
    (number,) = continue_reratings().issued
    assert number in page(other, f"{path}/panels/changes")
    (note,) = unscoped(Invoice).filter(number=number)
    assert (note.subtotal, note.refers_to_id) == (600, invoice.pk)
    assert "Debit note" not in page(other, f"/operator/billing/{note.pk}")
    page(author, f"{path}/discard", 422, typed="")
