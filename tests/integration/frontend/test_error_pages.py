"""The pages of 403 and 404: the layout stays, the reason is named, and a link leads back."""

from __future__ import annotations

import re
from html import unescape
from typing import Any
from urllib.parse import unquote

import pytest
from django.test import Client
from django.utils import translation

from tenants import actions
from tenants.models import Tenant, User
from tests.support.rows import only_project

pytestmark = pytest.mark.django_db
NAV = '<nav class="nav"'


def log_in(tenant: Tenant | None, role: str, name: str = "") -> Client:
    user = User.objects.create_user(f"{role}@example.com", name=name)
    if tenant is not None:
        actions.do_add_member(tenant, user, role)
    client = Client()
    client.force_login(user)
    return client


def texts(response: Any) -> list[str]:
    """Return the paragraphs of the error."""
    page = response.content.decode().split("<main", 1)[-1]
    return [unescape(re.sub(r"<[^>]+>", "", text)).strip() for text in re.findall(r"<p>(.*?)</p>", page, re.S)]


@pytest.fixture
def developer(acme: Tenant) -> Client:
    for role, name in (("owner", "Olive Owner"), ("admin", "")):
        actions.do_add_member(acme, User.objects.create_user(f"{role}@example.com", name=name), role)
    return log_in(acme, "developer")


def test_a_missing_permission_names_the_roles_and_whom_to_ask(developer):
    response = developer.get("/t/acme/invoices/")
    page = response.content.decode()
    assert (response.status_code, NAV in page, "<h1>Access denied</h1>" in page) == (403, True, True)
    reason, ask, back = texts(response)
    assert reason == "To open Invoices, you need the role Billing, Admin or Owner. You are Developer."
    assert ask == "Ask Olive Owner or admin@example.com."
    assert back == "Back to Overview"
    assert 'href="/t/acme/"' in page.split("<main")[1]


def test_a_page_of_a_screen_leads_back_to_the_screen(developer):
    response = developer.get("/t/acme/members/invite")
    assert texts(response)[0] == "For this page, you need the role Admin or Owner. You are Developer."
    assert texts(response)[-1] == "Back to Members"
    assert '<a class="button" href="/t/acme/members/">' in response.content.decode()


def test_a_part_of_a_page_reports_the_reason_to_the_script(developer):
    response = developer.get("/t/acme/members/invite", headers={"HX-Request": "true"})
    assert (response.status_code, b"<html" in response.content) == (403, False)
    assert unquote(response.headers["X-Reason"]).startswith("For this page, you need the role Admin or Owner.")
    with translation.override("de"):
        developer.cookies["language"] = "de"
        german = developer.get("/t/acme/members/invite", headers={"HX-Request": "true"})
    assert "Rolle" in unquote(german.headers["X-Reason"])


def test_a_row_that_is_not_found_keeps_the_layout(developer, acme):
    actions.do_create_api_key(only_project(acme), "prod")
    response = developer.get("/t/acme/keys/999999/")
    page = response.content.decode()
    assert (response.status_code, NAV in page, 'data-letter="k" aria-current="page"' in page) == (404, True, True)
    assert texts(response) == ["Nothing is at this URL. It was deleted, or the link is wrong.", "Back to API keys"]


def test_an_unknown_organization_is_another_cause_than_an_unknown_row(developer):
    response = developer.get("/t/unknown/")
    page = response.content.decode()
    assert (response.status_code, NAV in page, "/t/acme/" in page) == (404, True, True)
    assert texts(response)[0] == (
        "The URL is wrong, or you don’t have access. You are signed in as developer@example.com."
    )
    assert developer.get("/nowhere", headers={"accept": "text/html"}).status_code == 404


def test_visitors_see_no_layout(client):
    response = client.get("/nowhere", headers={"accept": "text/html"})
    assert (response.status_code, NAV in response.content.decode()) == (404, False)


def test_operators_read_that_their_view_is_read_only(acme):
    operator = Client()
    operator.force_login(User.objects.create_superuser("op@example.com"))
    response = operator.post("/t/acme/keys/new", {"name": "x"})
    assert (response.status_code, texts(response)[0]) == (
        403,
        "You view organizations as an operator. The view is read-only.",
    )
    response = operator.get("/operator/prices/999999/")
    assert (response.status_code, texts(response)[-1]) == (404, "Back to Price book")


def test_a_form_with_an_old_token_names_the_cause(developer):
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = developer.cookies
    response = strict.post("/t/acme/keys/new", {"name": "x"})
    assert (response.status_code, NAV in response.content.decode()) == (403, True)
    assert texts(response)[0].startswith("You signed in or out in another tab")
