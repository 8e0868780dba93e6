"""One project: its figures, keys and budgets."""

from __future__ import annotations

from typing import Any

import pytest

from billing.budgets.budgets import do_make_budget
from tenants import actions
from tests.support.billing.books import rate_card
from tests.support.rows import only_project

pytestmark = [pytest.mark.django_db, pytest.mark.acme(signed_in="owner")]


def page(client: Any, path: str) -> str:
    response = client.get(f"/t/acme/{path}")
    assert response.status_code == 200
    text = str(response.content.decode())
    assert "did not load" not in text
    return text


def test_a_project_has_only_its_own_usage_keys_and_budgets(client, acme, use):
    main, other = only_project(acme), actions.do_create_project(acme, "lab", "Lab")
    key, _ = actions.do_create_api_key(main, "prod")
    of_lab, _ = actions.do_create_api_key(other, "lab-key")
    version = rate_card()
    use(acme, key_id=key.pk, project_id=main.pk, uncached=1_000_000, price_version=version)
    use(acme, key_id=of_lab.pk, project_id=other.pk, uncached=7_000_000, price_version=version)
    do_make_budget(acme, name="Lab cap", unit="money", period="month", amount=10**9, project=other)
    do_make_budget(acme, name="Whole", unit="money", period="month", amount=10**9)

    text = page(client, f"projects/{main.pk}/")
    assert "prod" in text and "lab-key" not in text and "Lab cap" not in text
    response = client.get(f"/t/acme/projects/{other.pk}/panels/figures", headers={"HX-Request": "true"})
    figures = response.context["panel"]
    assert (figures["accepted"], figures["active_keys"], figures["keys"]) == (1, 1, 1)
    text = page(client, f"projects/{other.pk}/")
    assert "lab-key" in text and "Lab cap" in text and "Whole" not in text
    assert f"owner=project:{other.pk}" in text


def test_projects_are_found_by_the_palette_and_listed(client, acme):
    project = actions.do_create_project(acme, "lab", "Laboratory")
    assert f"/t/acme/projects/{project.pk}/" in page(client, "search?q=labo")
    assert "Laboratory" in page(client, "projects/")
    assert client.get("/t/acme/projects/999999/").status_code == 404
