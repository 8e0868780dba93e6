"""The models of the playground: only deployments that accept requests."""

from __future__ import annotations

from typing import Any

import pytest

from inference_worker.contract.deployments import WantedState
from millrace.apps.deployments.deployments import do_add_deployment, do_import_settings, do_set_deployment_state
from tenants import actions
from tenants.models import User
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
