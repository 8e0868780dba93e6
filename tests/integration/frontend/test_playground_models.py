"""The models of the playground, which are only deployments that accept requests, and its list of keys."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.tenant.playground import page as playground_page
from inference_worker.contract.deployments import WantedState
from millrace.apps.deployments.deployments import do_add_deployment, do_import_settings, do_set_deployment_state
from tenants import actions
from tenants.models import ApiKey, User
from tests.support.rows import only_project

pytestmark = pytest.mark.django_db


def test_a_drained_or_unloaded_deployment_cannot_be_chosen(client: Any, settings: Any) -> None:
    do_import_settings(settings.MILLRACE.models)
    for name, state in (("own-ready", "loaded"), ("own-drained", "drained"), ("own-unloaded", "unloaded")):
        do_add_deployment(name, "/models/own")
        do_set_deployment_state(name, WantedState(state))
    acme = actions.do_create_tenant("acme", "Acme")
    actions.do_create_api_key(only_project(acme), "live")
    owner = User.objects.create_user("owner@example.com")
    actions.do_add_member(acme, owner, "owner")
    client.force_login(owner)
    page = client.get("/t/acme/playground/").content.decode()
    assert 'value="own-ready"' in page
    assert 'value="own-drained"' not in page
    assert 'value="own-unloaded"' not in page


def test_the_list_of_keys_is_bounded(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playground_page, "MAX_KEYS", 2)
    acme = actions.do_create_tenant("acme", "Acme")
    keys: list[ApiKey] = [actions.do_create_api_key(only_project(acme), name)[0] for name in ("a", "b", "c", "d")]
    owner = User.objects.create_user("owner@example.com")
    actions.do_add_member(acme, owner, "owner")
    client.force_login(owner)

    def listed(query: str) -> list[str]:
        page = client.get(f"/t/acme/playground/{query}").content.decode()
        assert "The first 2 keys by name." in page
        return [key.name for key in keys if f'<option value="{key.pk}"' in page]

    assert listed("") == listed(f"?key={keys[0].pk}") == ["a", "b"]
    assert listed(f"?key={keys[3].pk}") == ["a", "b", "d"]
