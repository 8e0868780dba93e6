"""Limits, policies and delayed deletion, and the resulting key snapshots."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import IntegrityError, transaction

from tenants import actions
from tenants.actions import ActionRefused, Conflict, VersionConflict
from tenants.isolation.scopes import tenant_scope
from tenants.models import ApiKey, LimitSet, Project, RoutingPolicy, Tenant
from tenants.tasks import purge_deleted
from tests.support.rows import of, only_project, unscoped
from tests.support.tenants.concurrency import at_once

pytestmark = pytest.mark.usefixtures("all_models_served")


def test_limits_are_in_the_snapshots_of_their_keys(acme, row):
    project, lab = only_project(acme), actions.do_create_project(acme, "lab", "Lab")
    key, secret = actions.do_create_api_key(project, "k")
    _, of_lab = actions.do_create_api_key(lab, "k")
    actions.do_set_limits(acme, {"requests_per_day": 100}, set_by_operator=True)
    actions.do_set_limits(acme, {"tokens_per_minute": 50}, project=lab, model="m", dry_run=True)
    actions.do_set_limits(acme, {"concurrency": 1}, key=key)
    assert [(each.scope, each.requests_per_day, each.concurrency) for each in row(secret).limits.sets] == [
        ("key", None, 1),
        ("tenant", 100, None),
    ]
    assert [(each.scope, each.model, each.dry_run) for each in row(of_lab).limits.sets] == [
        ("project", "m", True),
        ("tenant", "", False),
    ]


def test_setting_limits_again_updates_the_same_row(acme, row):
    key, secret = actions.do_create_api_key(only_project(acme), "k")
    first = actions.do_set_limits(acme, {"concurrency": 1, "tokens_per_day": 5}, key=key)
    again = actions.do_set_limits(acme, {"concurrency": 2}, key=key)
    assert first.pk == again.pk  # whose buckets continue
    (each,) = row(secret).limits.sets
    assert (each.concurrency, each.tokens_per_day) == (2, None)
    assert actions.do_remove_limits(again)
    assert not actions.do_remove_limits(again)
    assert row(secret).limits.sets == ()


@pytest.mark.parametrize(
    "limits", [{}, {"concurrency": None}, {"concurrency": -1}, {"speed": 1}, {"concurrency": 2**63}]
)
def test_invalid_limits_are_rejected(acme, limits):
    with pytest.raises(ActionRefused):
        actions.do_set_limits(acme, limits)
    assert not unscoped(LimitSet).exists()


def test_limits_of_other_tenants_objects_are_rejected(acme):
    theirs = only_project(actions.do_create_tenant("other", "Other"))
    key, _ = actions.do_create_api_key(only_project(acme), "k")
    with pytest.raises(ActionRefused, match="another tenant"):
        actions.do_set_limits(acme, {"concurrency": 1}, project=theirs)
    with pytest.raises(ActionRefused, match="not both"):
        actions.do_set_limits(acme, {"concurrency": 1}, project=only_project(acme), key=key)
    with pytest.raises(IntegrityError, match="of_tenant"), transaction.atomic(), tenant_scope(acme):
        LimitSet.objects.create(tenant=acme, project=theirs, concurrency=1)


@pytest.mark.django_db(transaction=True)
def test_limits_set_concurrently_are_one_row():
    acme = actions.do_create_tenant("acme", "Acme")
    found = at_once(*[lambda: actions.do_set_limits(acme, {"concurrency": 1})] * 4)
    assert len({row.pk for row in found}) == 1


def bodies(acme: Tenant) -> list[tuple[int, bool, list[str]]]:
    rows = of(RoutingPolicy, acme)
    return sorted((row.version, row.active, row.body["models"]) for row in rows)


def test_policies_have_versions(acme, row):
    _, secret = actions.do_create_api_key(only_project(acme), "k")
    first = actions.do_publish_policy(acme, "fast", {"models": ["a"]})
    actions.do_publish_policy(acme, "fast", {"models": ["b"]})
    assert list(row(secret).policies) == ["fast"]
    assert row(secret).policies["fast"].models == ("b",)
    assert actions.do_revert_policy(first).version == 3
    assert bodies(acme) == [(1, False, ["a"]), (2, False, ["b"]), (3, True, ["a"])]
    assert row(secret).policies["fast"].models == ("a",)
    assert actions.do_withdraw_policy(acme, "fast")
    assert not actions.do_withdraw_policy(acme, "fast")
    assert row(secret).policies == {}


@pytest.mark.parametrize(("name", "body"), [("", {"models": ["a"]}), ("x" * 65, {"models": ["a"]}), ("x", {"no": 1})])
def test_invalid_policies_are_rejected(acme, name, body):
    with pytest.raises(ActionRefused):
        actions.do_publish_policy(acme, name, body)


@pytest.mark.django_db(transaction=True)
def test_policies_published_concurrently_have_separate_versions():
    acme = actions.do_create_tenant("acme", "Acme")
    at_once(*[lambda: actions.do_publish_policy(acme, "fast", {"models": ["a"]})] * 4)
    assert [(version, active) for version, active, _ in bodies(acme)] == [(1, False), (2, False), (3, False), (4, True)]


@pytest.mark.django_db(transaction=True)
def test_of_concurrent_changes_of_one_version_one_is_published():
    acme = actions.do_create_tenant("acme", "Acme")
    actions.do_publish_policy(acme, "fast", {"models": ["a"]}, base_version=0)
    results = at_once(*[lambda: actions.do_publish_policy(acme, "fast", {"models": ["a"]}, base_version=1)] * 4)
    refused = [result for result in results if isinstance(result, VersionConflict)]
    assert [exc.active for exc in refused] == [2, 2, 2]
    assert [(version, active) for version, active, _ in bodies(acme)] == [(1, False), (2, True)]


def test_a_deleted_tenant_can_be_restored_until_it_is_purged(acme, row):
    _, secret = actions.do_create_api_key(only_project(acme), "k")
    assert actions.do_delete_tenant(acme)
    assert not actions.do_delete_tenant(acme)
    assert row(secret).suspended
    assert purge_deleted() == 0
    assert actions.do_restore_tenant(acme)
    assert not actions.do_restore_tenant(acme)
    assert not row(secret).suspended
    assert not actions.do_purge_tenant(acme, now=datetime.now(UTC) + timedelta(days=400))
    actions.do_suspend_tenant(acme)
    actions.do_delete_tenant(acme)
    actions.do_restore_tenant(acme)
    assert row(secret).suspended  # with its previous status


def test_purging_removes_only_the_tenants_data(acme):
    other = actions.do_create_tenant("other", "Other")
    for tenant in (acme, other):
        key, _ = actions.do_create_api_key(only_project(tenant), "k")
        actions.do_set_limits(tenant, {"concurrency": 1}, key=key)
        actions.do_publish_policy(tenant, "fast", {"models": ["a"]})
        actions.do_invite(tenant, "new@example.com", "admin")
        actions.record_key_usage({key.pk: datetime.now(UTC)})
    actions.do_delete_tenant(acme)
    with tenant_scope(acme):
        Tenant.objects.for_tenant(acme).update(purge_after=datetime.now(UTC) - timedelta(seconds=1))
    assert purge_deleted() == 1
    assert purge_deleted() == 0
    for model in (ApiKey, Project, LimitSet, RoutingPolicy):
        assert {row.tenant_id for row in unscoped(model).all()} == {other.pk}, model
    left = unscoped(Tenant).get(pk=acme.pk)
    assert (left.status, left.slug, left.name) == ("purged", f"purged-{acme.pk}", f"Purged tenant {acme.pk}")
    with pytest.raises(Conflict, match="no longer exists"):
        actions.do_restore_tenant(acme)
    actions.do_create_tenant("acme", "Acme again")
