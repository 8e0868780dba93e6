"""The quick start, the checklist of the first steps, and the list of shortcuts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from billing.budgets.budgets import do_make_budget
from tenants import actions
from tenants.models import Tenant, User
from tests.support.billing.books import rate_card
from tests.support.rows import only_project

pytestmark = pytest.mark.django_db


@pytest.fixture
def owner(client: Any, acme: Tenant) -> User:
    user = User.objects.create_user("owner@example.com")
    actions.do_add_member(acme, user, "owner")
    client.force_login(user)
    return user


def steps(client: Any) -> dict[str, bool]:
    """Return the shown steps and whether they are done."""
    response = client.get("/t/acme/panels/checklist", headers={"HX-Request": "true"})
    assert response.status_code == 200
    found = re.findall(r"(Done|Open):</span></span><div><h3>([^<]+)</h3>", response.content.decode())
    return {label: state == "Done" for state, label in found}


def test_the_quick_start_has_four_languages_until_the_first_request(client, acme, owner, use):
    page = client.get("/t/acme/").content.decode()
    for expected in ("from openai import OpenAI", "import OpenAI from", "curl http", "from anthropic import Anthropic"):
        assert expected in page
    assert page.count("smollm2-135m") >= 4
    key, _ = actions.do_create_api_key(only_project(acme), "prod")
    use(acme, key_id=key.pk, project_id=key.project_id, uncached=10, output=1, price_version=rate_card())
    assert "from anthropic import Anthropic" not in client.get("/t/acme/").content.decode()


def test_the_steps_tick_themselves_and_disappear_when_all_are_done(client, acme, owner, use):
    labels = ["Create an API key", "Send a request", "Set a budget", "Invite a colleague"]
    assert steps(client) == dict.fromkeys(labels, False)
    key, _ = actions.do_create_api_key(only_project(acme), "prod")
    assert steps(client) == dict.fromkeys(labels, False) | {labels[0]: True}
    use(acme, key_id=key.pk, project_id=key.project_id, uncached=10, output=1, price_version=rate_card())
    do_make_budget(acme, name="All", unit="money", period="month", amount=10**9)
    assert steps(client) == dict.fromkeys(labels, True) | {labels[3]: False}
    actions.do_invite(acme, "new@example.com", "developer", by=owner)
    assert steps(client) == {}


def test_a_hidden_checklist_stays_hidden(client, acme, owner):
    assert "First steps" in client.get("/t/acme/").content.decode()
    response = client.post("/preferences", {"checklist": "off"}, headers={"referer": "http://testserver/t/acme/"})
    assert response.status_code == 302
    assert "First steps" not in client.get("/t/acme/").content.decode()


def test_a_member_who_cannot_take_the_steps_does_not_see_them(client, acme):
    reader = User.objects.create_user("reader@example.com")
    actions.do_add_member(acme, reader, "readonly")
    client.force_login(reader)
    assert "First steps" not in client.get("/t/acme/").content.decode()


def test_the_list_of_shortcuts_has_the_screens_of_the_user(client, acme, owner):
    page = client.get("/t/acme/shortcuts").content.decode()
    assert "<dt>API keys</dt><dd><kbd>g</kbd> <kbd>k</kbd></dd>" in page
    assert "data-shortcuts" in page
