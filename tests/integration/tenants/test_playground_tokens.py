"""Creation of playground tokens."""

from __future__ import annotations

import pytest

from millrace.environment.configuration import platform_settings
from tenants import actions
from tenants.keys import playground_tokens
from tenants.models import AuditEntry, Tenant, User
from tests.support.rows import only_project, unscoped


@pytest.mark.django_db
def test_creation_is_audited_and_rejected_for_unusable_keys():
    tenant: Tenant = actions.do_create_tenant("acme", "Acme")
    user = User.objects.create_user("dev@example.com")
    key, _ = actions.do_create_api_key(only_project(tenant), "k")
    token = playground_tokens.read(platform_settings().secret_key, actions.do_create_playground_token(key, user))
    assert (token.key_id, token.tenant_id, token.user_id) == (key.pk, tenant.pk, user.pk)
    (entry,) = unscoped(AuditEntry).filter(action="key.playground_token_created")
    assert (entry.object_id, entry.tenant_id, entry.after) == (key.pk, tenant.pk, {"user_id": user.pk})
    other, _ = actions.do_create_api_key(only_project(tenant), "books", scopes=("manage",))
    actions.do_revoke_api_key(key)
    for unusable in (key, other):
        with pytest.raises(actions.Conflict):
            actions.do_create_playground_token(unusable, user)
