"""manage.py create_api_key and revoke_api_key."""

from __future__ import annotations

import io

import pytest
from django.core.management import CommandError, call_command

from tenants import actions
from tenants.models import Project
from tests.support.rows import of, only_project


def manage(*words: str) -> str:
    out = io.StringIO()
    call_command(*words, stdout=out)
    return out.getvalue()


@pytest.mark.django_db
def test_create_key(row):
    tenant = actions.do_create_tenant("acme", "Acme")
    actions.do_create_project(tenant, "lab", "Lab")
    secret = manage("create_api_key", "acme", "--project", "lab", "--scope", "manage", "--model", "m").strip()
    made = row(secret)
    assert (made.tenant_id, made.scopes, made.models) == (tenant.pk, ("manage",), ("m",))
    assert made.project_id == of(Project, tenant, slug="lab")[0].pk
    assert set(row(manage("create_api_key", "acme").strip()).scopes) == {"inference", "models"}


@pytest.mark.django_db
@pytest.mark.parametrize("words", [["unknown"], ["acme", "--project", "theirs"]])
def test_create_key_rejects_other_tenants(words):
    actions.do_create_tenant("acme", "Acme")
    actions.do_create_project(actions.do_create_tenant("other", "Other"), "theirs", "Theirs")
    with pytest.raises(CommandError, match=r"does not exist|no project"):
        manage("create_api_key", *words)


@pytest.mark.django_db
def test_revoke_key(row):
    project = only_project(actions.do_create_tenant("acme", "Acme"))
    key, secret = actions.do_create_api_key(project, "k")
    _, kept = actions.do_create_api_key(project, "kept")
    assert "Revoked k" in manage("revoke_api_key", key.prefix)
    assert row(secret).revoked
    assert not row(kept).revoked
    assert "already" in manage("revoke_api_key", key.prefix)
    with pytest.raises(CommandError, match="No keys"):
        manage("revoke_api_key", "sk-mr-unknown")
