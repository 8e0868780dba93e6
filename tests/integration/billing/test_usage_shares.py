"""Usage by project and cost center: on invoices, in their CSV, and recomputed after keys and projects changed."""

from __future__ import annotations

import csv
import io
from collections import Counter
from typing import Any

import pikepdf
import pypdf
import pytest
from django.test import Client

from billing.invoicing import checks, ubl
from billing.invoicing.corrections import do_void
from billing.invoicing.document import divide_usage, in_words
from billing.invoicing.drafts import do_close_period, do_draft
from billing.invoicing.exports import as_csv, html
from billing.invoicing.facturx import xml as cii
from billing.invoicing.pdf import render_pdf
from billing.invoicing.preview import preview
from billing.models import Invoice, UsageEvent
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import ApiKey, Project, Tenant, User
from tests.support.billing.books import NOVEMBER, OCTOBER, invoiced, over, pdf_of, period, price, take_back, use
from tests.support.billing.invoice_forms import document_of
from tests.support.rows import only_project, unscoped
from tests.support.tenants.management_api import by_role, only_default

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]
MILLION = 10**6


@pytest.fixture
def keys(acme: Tenant) -> dict[str, ApiKey]:
    """Keys of two projects, of which two have a cost center."""
    default, lab = only_project(acme), actions.do_create_project(acme, "lab", "Lab")
    made = {"web": (default, "4711"), "batch": (default, ""), "trial": (lab, "=R&D"), "other": (lab, "")}
    return {
        name: actions.do_create_api_key(project, name, cost_center=center)[0]
        for name, (project, center) in made.items()
    }


def spend(tenant: Tenant, key: ApiKey, *used: tuple[int, int], **options: Any) -> None:
    use(tenant, options.pop("at", OCTOBER), *used, project_id=key.project_id, key_id=key.pk, **options)


@pytest.fixture
def invoice(acme: Tenant, keys: dict[str, ApiKey]) -> Invoice:
    """An invoice with two lines of usage, each of which is a cent less than its rounded parts."""
    first, second = price("1.005", model="a"), price("0.025", model="b")
    spend(acme, keys["web"], (first, MILLION))
    spend(acme, keys["batch"], (first, MILLION))
    spend(acme, keys["trial"], (first, MILLION))
    spend(acme, keys["trial"], (second, MILLION))
    spend(acme, keys["other"], (second, MILLION))
    return invoiced(acme, OCTOBER)


def find_checked(row: Invoice) -> tuple[bool, bool]:
    with all_tenants_scope(BypassReason.BILLING):
        rows = Invoice.objects.all_tenants().select_related("period", "entity", "refers_to", "replaces")
        result = checks.check(rows.get(pk=row.pk))
    return result.same_data, result.same_pdf


def test_each_section_sums_to_the_usage(invoice):
    described = document_of(invoice)
    sections = dict(divide_usage(described["lines"]))
    # a: 3.015 = 3.02 of 1.005 + 1.005 + 1.005; b: 0.05 of 0.025 + 0.025
    assert sections == {
        "project": [("Default", 202), ("Lab", 105)],
        "cost_center": [("4711", 101), ("=R&D", 102), ("", 104)],
    }
    usage = sum(line["cents"] for line in described["lines"])
    assert {name: sum(cents for _, cents in sums) for name, sums in sections.items()} == dict.fromkeys(sections, usage)
    for line in described["lines"]:
        for name in ("events", "tokens", "cents"):
            assert sum(share[name] for share in line["shares"]) == line[name]
        assert sum(int(share["femto"]) for share in line["shares"]) == int(line["femto"])


def test_the_pdf_and_the_page_show_the_sections(invoice):
    pages = pypdf.PdfReader(io.BytesIO(pdf_of(invoice))).pages
    text = "\n".join(page.extract_text() for page in pages)
    shown = html(document_of(invoice))
    for title in ("Usage by project", "Usage by cost center", "No cost center", "Total usage", "4711", "Lab"):
        assert title in text, title
        assert title in shown, title
    assert "$2.02" in text


def test_the_csv_has_a_row_for_each_project_and_cost_center(invoice):
    described = document_of(invoice)
    rows = list(csv.DictReader(io.StringIO(as_csv(described))))
    assert list(rows[0])[-2:] == ["project", "cost_center"]
    assert len(rows) == sum(len(line["shares"]) for line in described["lines"])
    sums: Counter[str] = Counter()
    for row in rows:
        sums[row["project"]] += round(float(row["usd"]) * 100)
    assert sums == {"Default": 202, "Lab": 105}
    assert {row["cost_center"] for row in rows} == {"4711", "'=R&D", ""}


def test_the_xml_does_not_change(invoice):
    described = document_of(invoice)
    plain = described | {
        "lines": [{name: value for name, value in line.items() if name != "shares"} for line in described["lines"]]
    }
    assert cii(described) == cii(plain)
    assert ubl.xml(described) == ubl.xml(plain)
    assert in_words(plain) == in_words(described) | {"sections": []}
    assert render_pdf(plain) != render_pdf(described)


def test_a_key_or_project_that_changes_later_changes_no_final_invoice(acme, keys, invoice):
    before = (document_of(invoice), pdf_of(invoice))
    assert find_checked(invoice) == (True, True)
    actions.do_update_project(next(row for row in unscoped(Project).all() if row.slug == "lab"), name="Moved")
    actions.do_update_api_key(keys["web"], cost_center="Other")
    actions.do_update_api_key(keys["trial"], cost_center="")
    for key in keys.values():
        actions.do_revoke_api_key(key)
    assert find_checked(invoice) == (True, True)
    assert (document_of(invoice), pdf_of(invoice)) == before


def test_drafts_and_the_preview_have_the_labels_of_their_time(acme, keys):
    charge = price("1", model="a")
    spend(acme, keys["web"], (charge, MILLION))
    month = period(OCTOBER)
    found = preview(acme, OCTOBER)
    assert found is not None
    assert [share["cost_center"] for share in found[1][0].shares or ()] == ["4711"]
    do_close_period(month, now=over(month))
    do_draft(month, acme)
    actions.do_update_api_key(keys["web"], cost_center="4712")
    (draft,) = do_draft(month, acme)
    assert divide_usage(document_of(draft)["lines"]) == [("cost_center", [("4712", 100)])]


def test_a_cancellation_has_the_shares_of_its_invoice(invoice):
    do_void(invoice, "Wrong address")
    (note,) = [row for row in unscoped(Invoice).all() if row.invoice_type == "cancellation"]
    assert divide_usage(document_of(note)["lines"]) == divide_usage(document_of(invoice)["lines"])
    assert (find_checked(note), find_checked(invoice)) == ((True, True), (True, True))


def test_one_project_without_cost_centers_is_not_divided(acme):
    key = actions.do_create_api_key(only_project(acme), "k")[0]
    actions.do_create_project(acme, "unused", "Unused")
    spend(acme, key, (price("1"), MILLION))
    invoice = invoiced(acme, OCTOBER)
    described = document_of(invoice)
    assert (invoice.usage_labels, in_words(described)["sections"]) == (None, [])
    assert "shares" not in described["lines"][0]
    assert as_csv(described).splitlines()[0].endswith(",usd_per_million,usd_exact,usd")
    assert "Usage by" not in html(described)
    assert find_checked(invoice) == (True, True)


def test_projects_of_the_same_name_have_their_slug(acme, keys):
    second = actions.do_create_project(acme, "lab-2", "Lab")
    key = actions.do_create_api_key(second, "k")[0]
    for each in (keys["other"], key):
        spend(acme, each, (price("1", model=f"m{each.pk}"), MILLION))
    sections = dict(divide_usage(document_of(invoiced(acme, OCTOBER))["lines"]))
    assert sections == {"project": [("Lab (lab)", 100), ("Lab (lab-2)", 100)]}


def test_late_and_reversed_usage_is_divided(acme, keys):
    charge = price("1", model="a")
    spend(acme, keys["web"], (charge, MILLION), request_id="first")
    invoiced(acme, OCTOBER)
    spend(acme, keys["trial"], (charge, 2 * MILLION))  # late: its month is closed
    spend(acme, keys["batch"], (price("1", model="c", number=11), MILLION), at=NOVEMBER)
    event = unscoped(UsageEvent).get(request_id="first")
    take_back(event, NOVEMBER)
    month = period(NOVEMBER)
    do_close_period(month, now=over(month))
    invoice, correction = sorted(do_draft(month, acme), key=lambda row: row.invoice_type, reverse=True)
    assert divide_usage(document_of(invoice)["lines"]) == [
        ("project", [("Default", 100), ("Lab", 200)]),
        ("cost_center", [("=R&D", 200), ("", 100)]),
    ]
    assert "shares" not in document_of(correction)["lines"][0]


def test_tenants_see_only_their_own_labels(acme, keys):
    """Two events of another tenant have keys and projects of acme."""
    other = actions.do_create_tenant("beta", "Beta")
    actions.do_create_project(other, "second", "Second")
    actions.do_create_api_key(only_default(other), "k", cost_center="4711")
    charge = price("1", model="a")
    spend(acme, keys["web"], (charge, MILLION))
    spend(other, keys["web"], (charge, MILLION))
    spend(other, keys["trial"], (charge, MILLION))
    month = period(OCTOBER)
    do_close_period(month, now=over(month))
    drafts = {row.tenant_id: row for row in do_draft(month)}
    assert divide_usage(document_of(drafts[acme.pk])["lines"]) == [("cost_center", [("4711", 100)])]
    names = sorted(f"Project {keys[name].project_id}" for name in ("web", "trial"))
    assert divide_usage(document_of(drafts[other.pk])["lines"]) == [("project", [(name, 100) for name in names])]


def test_the_attached_xml_is_that_of_the_document(invoice):
    with pikepdf.open(io.BytesIO(pdf_of(invoice))) as file:
        (name,) = file.attachments
        assert file.attachments[name].get_file().read_bytes() == cii(document_of(invoice))


def test_events_have_the_cost_center_of_their_key(acme, keys):
    spend(acme, keys["web"], (price("1"), MILLION))
    reader = by_role(acme, "owner")
    found = reader.get("/api/usage/events?from=2026-10-01T00:00Z&format=csv").content.decode()
    (row,) = csv.DictReader(io.StringIO(found))
    assert (row["project_id"], row["key_id"], row["cost_center"]) == (
        str(keys["web"].project_id),
        str(keys["web"].pk),
        "4711",
    )
    invoice = invoiced(acme, OCTOBER)
    (event,) = reader.get(f"/api/invoices/{invoice.pk}/events").json()["results"]
    assert event["cost_center"] == "4711"


def test_the_console_shows_the_sections(acme, invoice):
    browser = Client()
    user = User.objects.create_user("owner@example.com")
    actions.do_add_member(acme, user, "owner")
    browser.force_login(user)
    shown = browser.get(f"/t/acme/invoices/{invoice.pk}").content.decode()
    for text in ("Usage by project", "Usage by cost center", "No cost center", "Lab", "=R&amp;D", "$2.02"):
        assert text in shown, text
