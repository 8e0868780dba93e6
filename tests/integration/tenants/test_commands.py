"""manage.py bootstrap, create_api_key and revoke_api_key, as an operator or `millrace up` runs them."""

from __future__ import annotations

import io
import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from tenants import actions
from tenants.authentication import accesses
from tenants.models import ApiKey, Membership, Project, Tenant, User
from tests.support.rows import of, only_project, unscoped


def manage(*words: str) -> str:
    out = io.StringIO()
    call_command(*words, stdout=out)
    return out.getvalue()


def bootstrap() -> dict[str, str]:
    (line,) = manage("bootstrap").splitlines()
    return json.loads(line)


@pytest.fixture
def credentials() -> Path:
    """Return the path of bootstrap's secrets, which do not exist yet."""
    path = Path(os.environ["MILLRACE_DATA_DIR"], "credentials.json")
    path.unlink(missing_ok=True)
    return path


def keys() -> list[ApiKey]:
    return unscoped(ApiKey).all()


@pytest.mark.django_db
def test_bootstrap_creates_a_routing_policy_for_the_demo(credentials, row):
    policy = row(bootstrap()["demo_key"]).policies["smollm2"]
    assert policy.models == ("smollm2-135m", "smollm2-135m-int8")


@pytest.mark.django_db
def test_bootstrap(credentials, row):
    said = bootstrap()
    assert list(said) == [
        *("operator_email", "operator_password", "owner_email", "owner_password", "demo_key", "tenant")
    ]
    operator, owner = (User.objects.get(email=said[f"{who}_email"]) for who in ("operator", "owner"))
    assert operator.is_staff
    assert not owner.is_staff
    assert owner.check_password(said["owner_password"])
    assert [access.role for access in accesses(owner)] == ["owner"]
    assert operator.is_superuser
    assert operator.check_password(said["operator_password"])
    assert set(row(said["demo_key"]).scopes) == {"inference", "manage", "models"}
    demo = unscoped(Tenant).get()
    assert (row(said["demo_key"]).tenant_id, said["tenant"], demo.slug) == (demo.pk, "demo", "demo")
    assert demo.is_demo
    assert stat.S_IMODE(credentials.stat().st_mode) == 0o600
    assert json.loads(credentials.read_text()) == said


@pytest.mark.django_db
def test_bootstrap_twice_changes_nothing(credentials):
    assert bootstrap() == bootstrap()
    assert (unscoped(Tenant).count(), User.objects.count(), len(keys())) == (1, 2, 1)


@pytest.mark.django_db
def test_bootstrap_creates_lost_secrets_again(credentials, row):
    old = bootstrap()
    credentials.unlink()
    new = bootstrap()
    assert old["demo_key"] != new["demo_key"]
    assert row(new["demo_key"]).tenant_id == unscoped(Tenant).get(slug="demo").pk
    for who in ("operator", "owner"):
        person = User.objects.get(email=new[f"{who}_email"])
        assert person.check_password(new[f"{who}_password"])
        assert not person.check_password(old[f"{who}_password"])


@pytest.mark.django_db
def test_bootstrap_replaces_a_revoked_demo_key(credentials, row):
    old = bootstrap()
    actions.do_revoke_api_key(keys()[0])
    new = bootstrap()
    assert row(old["demo_key"]).revoked
    assert not row(new["demo_key"]).revoked
    assert new["operator_password"] == old["operator_password"]


@pytest.mark.django_db
def test_bootstrap_keeps_a_chosen_password(credentials):
    bootstrap()
    operator = User.objects.get(is_staff=True)
    operator.set_password("one they chose themselves")
    operator.save()
    bootstrap()
    assert User.objects.get(is_staff=True).check_password("one they chose themselves")


@pytest.mark.django_db(transaction=True)
def test_concurrent_bootstraps_agree(credentials):
    start = threading.Barrier(4)

    def run(_: int) -> dict[str, str]:
        try:
            start.wait()
            return bootstrap()
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        said = list(pool.map(run, range(4)))
    assert said == [json.loads(credentials.read_text())] * 4
    assert (unscoped(Tenant).count(), User.objects.count(), len(keys())) == (1, 2, 1)


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


@pytest.mark.django_db
def test_the_operator_is_not_a_member(credentials):
    said = bootstrap()
    assert list(unscoped(Membership).values_list("user__email", flat=True)) == [said["owner_email"]]
