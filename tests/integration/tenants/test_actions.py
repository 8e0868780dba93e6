"""Actions: their changes, the resulting key snapshots, and their concurrency."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
import redis
from django.db import connection, transaction

from tenants import actions
from tenants.keys import snapshot
from tenants.keys.key_snapshots import notify_gateways
from tenants.models import ApiKey, ApiKeySnapshotRow, Membership, Project, Tenant, User
from tests.support.rows import of, only_project, unscoped


@pytest.fixture
def tenant(db) -> Tenant:
    return actions.do_create_tenant("acme", "Acme")


@pytest.fixture
def project(tenant) -> Project:
    return only_project(tenant)


def test_create_tenant(db):
    owner = User.objects.create_user("Owner@Example.com")
    tenant = actions.do_create_tenant("acme", "Acme", owner=owner)
    assert owner.email == "owner@example.com"
    assert [row.role for row in of(Membership, tenant)] == ["owner"]
    assert only_project(tenant).slug == "default"
    with pytest.raises(actions.ActionRefused, match="already"):
        actions.do_create_tenant("acme", "Acme again")


@pytest.mark.parametrize("slug", ["", "two words", "a/b", "s" * 51])
def test_create_tenant_rejects_an_invalid_slug(db, slug):
    with pytest.raises(actions.ActionRefused, match="slug: "):
        actions.do_create_tenant(slug, "Acme")
    assert not unscoped(Tenant).exists()


@pytest.mark.django_db(transaction=True)
def test_two_concurrent_tenants_with_one_slug_create_one():
    start = threading.Barrier(4)

    def make(_: int) -> bool:
        try:
            start.wait()
            actions.do_create_tenant("acme", "Acme")
        except actions.ActionRefused:
            return False
        finally:
            connection.close()
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(make, range(4))) == 1
    assert only_project(unscoped(Tenant).get())


def test_create_project(tenant):
    assert actions.do_create_project(tenant, "lab", "Lab").tenant == tenant
    with pytest.raises(actions.ActionRefused, match="already"):
        actions.do_create_project(tenant, "lab", "Lab")


def test_add_member(tenant):
    user = User.objects.create_user("dev@example.com")
    actions.do_add_member(tenant, user, "developer")
    actions.do_add_member(tenant, user, "admin")
    assert [row.role for row in of(Membership, tenant)] == ["admin"]
    with pytest.raises(actions.ActionRefused, match="Unknown role 'emperor'"):
        actions.do_add_member(tenant, user, "emperor")


def test_create_api_key(project, row):
    expires = datetime(2100, 1, 1, 0, 0, 0, 123456, tzinfo=UTC)
    key, secret = actions.do_create_api_key(project, "k", allowed_models=["m"], expires_at=expires)
    assert len(secret) == len("sk-mr-") + 43
    assert key.prefix == secret[:12]
    assert secret not in repr(unscoped(ApiKey).values())
    assert row(secret) == snapshot.ApiKeySnapshot(
        key_id=key.pk,
        tenant_id=project.tenant_id,
        project_id=project.pk,
        scopes=("inference", "models"),
        models=("m",),
        expires_at=4102444800123456,
        revoked=False,
        suspended=False,
        limits=snapshot.LimitSnapshot(),
        version=1,
    )


def test_create_api_key_rejects_invalid_values(project):
    with pytest.raises(actions.ActionRefused, match="Unknown scope omnipotence"):
        actions.do_create_api_key(project, "k", scopes=["omnipotence"])
    with pytest.raises(actions.ActionRefused, match="past"):
        actions.do_create_api_key(project, "k", expires_at=datetime.now(UTC) - timedelta(seconds=1))
    assert not unscoped(ApiKey).exists()


def test_revoke_api_key(project, row):
    key, secret = actions.do_create_api_key(project, "k")
    assert actions.do_revoke_api_key(key)
    assert not actions.do_revoke_api_key(key)
    key = unscoped(ApiKey).get(pk=key.pk)
    assert not key.is_live
    assert (row(secret).revoked, row(secret).version) == (True, 2)


def test_suspend_affects_only_its_tenant(tenant, project, row):
    other = only_project(actions.do_create_tenant("other", "Other"))
    secrets = [actions.do_create_api_key(project, str(number))[1] for number in range(2)]
    _, theirs = actions.do_create_api_key(other, "theirs")
    assert actions.do_suspend_tenant(tenant)
    assert not actions.do_suspend_tenant(tenant)
    assert [row(secret).suspended for secret in (*secrets, theirs)] == [True, True, False]
    assert actions.do_resume_tenant(tenant)
    assert not actions.do_resume_tenant(tenant)
    assert [(row(secret).suspended, row(secret).version) for secret in secrets] == [(False, 3)] * 2


@pytest.mark.django_db(transaction=True)
def test_revoking_removes_the_gateways_shared_copy(broker, row, hashed):
    project = only_project(actions.do_create_tenant("acme", "Acme"))
    key, secret = actions.do_create_api_key(project, "k")
    name = snapshot.valkey_name(hashed(secret))
    broker.set(name, snapshot.encode(row(secret)))
    with pytest.raises(RuntimeError), transaction.atomic():
        actions.do_revoke_api_key(key)
        raise RuntimeError("undone")
    assert not snapshot.decode(broker.get(name)).revoked
    actions.do_revoke_api_key(key)
    assert snapshot.decode(broker.get(name)).revoked
    assert 0 < broker.ttl(name) <= snapshot.VALKEY_SECONDS


@pytest.mark.django_db(transaction=True)
def test_a_late_message_does_not_restore_an_older_snapshot(broker, row, hashed):
    project = only_project(actions.do_create_tenant("acme", "Acme"))
    key, secret = actions.do_create_api_key(project, "k")
    old = row(secret)
    actions.do_revoke_api_key(key)
    notify_gateways([(hashed(secret), old)], old.tenant_id)
    assert snapshot.decode(broker.get(snapshot.valkey_name(hashed(secret)))).revoked


@pytest.mark.django_db(transaction=True)
def test_revoking_works_without_the_broker(monkeypatch, row):
    project = only_project(actions.do_create_tenant("acme", "Acme"))
    key, secret = actions.do_create_api_key(project, "k")
    nowhere = redis.Redis.from_url("redis://127.0.0.1:1/0")
    monkeypatch.setattr(redis.Redis, "from_url", lambda *_, **__: nowhere)
    assert actions.do_revoke_api_key(key)
    assert row(secret).revoked


@pytest.mark.django_db(transaction=True)
def test_after_concurrent_changes_the_snapshot_is_current(row):
    tenant = actions.do_create_tenant("acme", "Acme")
    project = only_project(tenant)
    made = [actions.do_create_api_key(project, str(number)) for number in range(4)]
    start = threading.Barrier(6)

    def run(act, thing):
        try:
            start.wait()
            return act(thing)
        finally:
            connection.close()

    work = [(actions.do_revoke_api_key, key) for key, _ in made] + [(actions.do_suspend_tenant, tenant)] * 2
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(run, *zip(*work, strict=True)))
    assert answers[:4] == [True] * 4
    assert sorted(answers[4:]) == [False, True]
    assert all(row(secret).revoked and row(secret).suspended for _, secret in made)
    assert unscoped(ApiKeySnapshotRow).count() == 4


@pytest.mark.django_db(transaction=True)
def test_a_key_created_during_a_suspension_is_suspended(row):
    """The key's transaction is open when the suspension starts. It must wait, or the key would stay active."""
    tenant = actions.do_create_tenant("acme", "Acme")
    project = only_project(tenant)

    def suspend():
        try:
            return actions.do_suspend_tenant(tenant)
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            _, secret = actions.do_create_api_key(project, "k")
            suspending = pool.submit(suspend)
            with pytest.raises(TimeoutError):
                suspending.result(timeout=0.5)
        assert suspending.result(timeout=60)
    assert row(secret).suspended
