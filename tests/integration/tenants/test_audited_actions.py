"""Every action writes an audit entry with actor, object, before and after, and publishes its changes to gateways."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import pytest
from django.db import DatabaseError, connection, transaction

from tenants import actions, audit
from tenants.actions import Conflict, users
from tenants.actions.notifications import ChosenChannels
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import (
    ApiKey,
    ApiKeySnapshotRow,
    AuditEntry,
    ChangeEventRow,
    Experiment,
    Invitation,
    LimitSet,
    Membership,
    Project,
    RoutingPolicy,
    Tenant,
    User,
)
from tenants.tenant_settings import GROUPS
from tests.support.rows import of, only_project, unscoped

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("all_models_served")]
BODY = {"models": ["smollm2-135m"]}


class World(NamedTuple):
    tenant: Tenant
    project: Project
    key: ApiKey
    secret: str
    owner: User
    dev: User
    member: Membership
    invitation: Invitation
    limits: LimitSet
    policy: RoutingPolicy


@pytest.fixture
def world() -> World:
    owner, dev = User.objects.create_user("owner@acme.example"), User.objects.create_user("dev@acme.example")
    tenant = actions.do_create_tenant("acme", "Acme", owner=owner)
    project = only_project(tenant)
    key, secret = actions.do_create_api_key(project, "k")
    return World(
        tenant,
        project,
        key,
        secret,
        owner,
        dev,
        actions.do_add_member(tenant, dev, "developer"),
        actions.do_invite(tenant, "new@acme.example", "billing"),
        actions.do_set_limits(tenant, {"requests_per_minute": 5}, key=key),
        actions.do_publish_policy(tenant, "fast", BODY),
    )


def suspended(world: World) -> Tenant:
    actions.do_suspend_tenant(world.tenant)
    return world.tenant


def deleted(world: World) -> Tenant:
    actions.do_delete_tenant(world.tenant)
    return world.tenant


def old_pepper(world: World) -> ApiKey:
    with tenant_scope(world.tenant):
        ApiKey.objects.for_tenant(world.tenant).filter(pk=world.key.pk).update(key_hash=b"o" * 32, pepper="old")
        return ApiKey.objects.for_tenant(world.tenant).get(pk=world.key.pk)


def no_pepper(world: World) -> None:
    with tenant_scope(world.tenant):
        ApiKey.objects.for_tenant(world.tenant).update(key_hash=b"o" * 32, pepper="")


def experiment(world: World) -> Experiment:
    arms = [{"name": "a", "share": 50}, {"name": "b", "share": 50, "model": "m"}]
    return actions.do_create_experiment(
        world.tenant, name="x", model="fast", arms=arms, primary_metric="cost", guardrails={"ttft": 0.1}
    )


LATER = datetime.now(UTC) + timedelta(days=400)
# action, call, its audit entries (oldest first), the change types sent to gateways
CASES: dict[str, tuple[Callable[[World], Any], list[str], set[str]]] = {
    "do_create_tenant": (lambda w: actions.do_create_tenant("b", "B"), ["tenant.created", "project.created"], set()),
    "do_update_tenant": (lambda w: actions.do_update_tenant(w.tenant, name="Acme Ltd"), ["tenant.updated"], set()),
    "do_update_settings": (
        lambda w: actions.do_update_settings(
            w.tenant,
            content_retention_days=7,
            unknown_parameters="reject",
            allowed_origins=["https://App.example/"],
            answer_cache_seconds=3600,
            answer_cache_sampled=True,
        ),
        [f"tenant.{group.name}_updated" for group in GROUPS],
        {"tenant"},
    ),
    "do_start_viewing": (
        lambda w: actions.do_start_viewing(w.tenant, LATER, "ticket 12"),
        ["tenant.view_started"],
        set(),
    ),
    "do_end_viewing": (lambda w: actions.do_end_viewing(w.tenant), ["tenant.view_ended"], set()),
    "do_note_api_access": (
        lambda w: [actions.do_note_api_access(w.tenant, "GET /api/keys") for _ in range(2)],
        ["tenant.api_accessed"],
        set(),
    ),
    "do_suspend_tenant": (lambda w: actions.do_suspend_tenant(w.tenant), ["tenant.suspended"], {"tenant"}),
    "do_resume_tenant": (
        lambda w: actions.do_resume_tenant(suspended(w)),
        ["tenant.suspended", "tenant.resumed"],
        {"tenant"},
    ),
    "do_delete_tenant": (lambda w: actions.do_delete_tenant(w.tenant), ["tenant.deleted"], {"tenant"}),
    "do_restore_tenant": (
        lambda w: actions.do_restore_tenant(deleted(w)),
        ["tenant.deleted", "tenant.restored"],
        {"tenant"},
    ),
    "do_purge_tenant": (
        lambda w: actions.do_purge_tenant(deleted(w), now=LATER),
        ["tenant.deleted", "tenant.purged"],
        {"tenant"},
    ),
    "do_create_project": (lambda w: actions.do_create_project(w.tenant, "lab", "Lab"), ["project.created"], set()),
    "do_update_project": (lambda w: actions.do_update_project(w.project, name="Main"), ["project.updated"], set()),
    "do_delete_project": (
        lambda w: actions.do_delete_project(actions.do_create_project(w.tenant, "lab", "Lab")),
        ["project.created", "project.deleted"],
        set(),
    ),
    "do_add_member": (
        lambda w: actions.do_add_member(w.tenant, User.objects.create_user("b@acme.example"), "billing"),
        ["member.created"],
        {"member"},
    ),
    "do_change_role": (lambda w: actions.do_change_role(w.member, "admin"), ["member.updated"], {"member"}),
    "do_remove_member": (lambda w: actions.do_remove_member(w.member), ["member.deleted"], {"member"}),
    "do_set_alert_emails": (
        lambda w: actions.do_set_alert_emails(w.tenant, w.owner, wanted=False),
        ["member.alert_emails_changed"],
        set(),
    ),
    "do_invite": (lambda w: actions.do_invite(w.tenant, "x@acme.example", "billing"), ["invitation.created"], set()),
    "do_revoke_invitation": (lambda w: actions.do_revoke_invitation(w.invitation), ["invitation.revoked"], set()),
    "do_accept_invitation": (
        lambda w: actions.do_accept_invitation(w.invitation, User.objects.create_user("new@acme.example")),
        ["invitation.accepted", "member.created"],
        {"member"},
    ),
    "do_create_api_key": (lambda w: actions.do_create_api_key(w.project, "k2"), ["key.created"], {"key"}),
    "do_update_api_key": (lambda w: actions.do_update_api_key(w.key, name="k3"), ["key.updated"], {"key"}),
    "do_rotate_api_key": (
        lambda w: actions.do_rotate_api_key(w.key, timedelta(hours=1)),
        ["key.rotated", "key.created"],
        {"key"},
    ),
    "do_revoke_api_key": (lambda w: actions.do_revoke_api_key(w.key), ["key.revoked"], {"key"}),
    "do_create_playground_token": (
        lambda w: actions.do_create_playground_token(w.key, w.owner),
        ["key.playground_token_created"],
        set(),
    ),
    "do_rehash_api_key": (lambda w: actions.do_rehash_api_key(old_pepper(w), w.secret), ["key.rehashed"], {"key"}),
    "do_rehash_unpeppered": (
        lambda w: (no_pepper(w), actions.do_rehash_unpeppered())[1],
        ["key.rehashed"],
        {"key"},
    ),
    "do_set_limits": (
        lambda w: actions.do_set_limits(w.tenant, {"concurrency": 3}, project=w.project),
        ["limits.updated"],
        {"limits"},
    ),
    "do_remove_limits": (lambda w: actions.do_remove_limits(w.limits), ["limits.deleted"], {"limits"}),
    "do_publish_policy": (
        lambda w: actions.do_publish_policy(w.tenant, "fast", BODY),
        ["policy.superseded", "policy.published"],
        {"policy"},
    ),
    "do_revert_policy": (
        lambda w: actions.do_revert_policy(w.policy),
        ["policy.superseded", "policy.reverted"],
        {"policy"},
    ),
    "do_save_policy_draft": (
        lambda w: actions.do_save_policy_draft(w.tenant, "slow", BODY),
        ["policy_draft.created"],
        set(),
    ),
    "do_discard_policy_draft": (
        lambda w: actions.do_discard_policy_draft(actions.do_save_policy_draft(w.tenant, "slow", BODY)),
        ["policy_draft.created", "policy_draft.deleted"],
        set(),
    ),
    "do_publish_policy_draft": (
        lambda w: actions.do_publish_policy_draft(actions.do_save_policy_draft(w.tenant, "slow", BODY)),
        ["policy_draft.created", "policy.published", "policy_draft.deleted"],
        {"policy"},
    ),
    "do_withdraw_policy": (
        lambda w: actions.do_withdraw_policy(w.tenant, "fast"),
        ["policy.withdrawn"],
        {"policy"},
    ),
    # Views are seen by their user only, so they have no entries.
    "do_save_view": (lambda w: actions.do_save_view(w.tenant, w.owner, "requests", "Slow", "slow=10"), [], set()),
    "do_delete_view": (
        lambda w: actions.do_delete_view(
            w.tenant, w.owner, actions.do_save_view(w.tenant, w.owner, "requests", "Slow", "slow=10").pk
        ),
        [],
        set(),
    ),
    "do_set_notification_channels": (
        lambda w: actions.do_set_notification_channels(
            w.tenant, w.owner, {"key_expires": ChosenChannels(in_console=True, by_email=False)}
        ),
        [],
        set(),
    ),
    "do_create_experiment": (experiment, ["experiment.created"], set()),
    "do_start_experiment": (
        lambda w: actions.do_start_experiment(experiment(w)),
        ["experiment.created", "experiment.started"],
        {"policy"},
    ),
    "do_stop_experiment": (
        lambda w: actions.do_stop_experiment(actions.do_start_experiment(experiment(w))),
        ["experiment.created", "experiment.started", "experiment.stopped"],
        {"policy"},
    ),
    "do_delete_experiment": (
        lambda w: actions.do_delete_experiment(experiment(w)),
        ["experiment.created", "experiment.deleted"],
        set(),
    ),
}
# Actions on users belong to no tenant; tests/integration/tenants/test_users.py tests them.
VERBS = [
    name for name in dir(actions) if name.startswith("do_") and getattr(actions, name).__module__ != users.__name__
]


def test_every_action_is_tested():
    assert set(CASES) == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_an_action_writes_its_audit_entries(verb, world):
    act, expected, kinds = CASES[verb]
    last = max(entry.pk for entry in unscoped(AuditEntry).all())
    reported = max(change.pk for change in unscoped(ChangeEventRow).all())
    actor = audit.Actor("another-user", user_id=7, ip_address="192.0.2.1", request_id="req_1")
    with audit.actor_context(actor):
        assert act(world) is not False
    entries = unscoped(AuditEntry).filter(pk__gt=last)
    entries.sort(key=lambda entry: entry.pk)
    assert [entry.action for entry in entries] == expected
    for entry in entries:
        assert (entry.actor, entry.actor_user_id, entry.ip_address, entry.request_id) == (
            "another-user",
            7,
            "192.0.2.1",
            "req_1",
        )
        assert entry.before or entry.after
        assert entry.before != entry.after
        assert entry.object_id
        assert entry.tenant_id
        for shown in (entry.before or {}, entry.after or {}):
            assert world.secret not in str(shown)
            assert "key_hash" not in shown
    assert {change.change_type for change in unscoped(ChangeEventRow).filter(pk__gt=reported)} == kinds


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("do_create_tenant", "do_rehash_unpeppered")])
def test_a_rolled_back_action_leaves_no_trace(verb, world):
    before = [
        (model, sorted(map(repr, unscoped(model).values())))
        for model in (AuditEntry, ChangeEventRow, ApiKeySnapshotRow)
    ]
    with pytest.raises(RuntimeError), transaction.atomic():
        CASES[verb][0](world)
        raise RuntimeError("undone")
    assert before == [(model, sorted(map(repr, unscoped(model).values()))) for model, _ in before]


NOT_OF_ONE = ("do_create_tenant", "do_rehash_unpeppered", "do_rehash_api_key", "do_end_viewing", "do_note_api_access")
OF_A_TENANT = [verb for verb in VERBS if verb not in NOT_OF_ONE]


@pytest.mark.parametrize("verb", OF_A_TENANT)
def test_actions_on_a_purged_tenant_are_rejected(verb, world):
    actions.do_delete_tenant(world.tenant)
    actions.do_purge_tenant(world.tenant, now=LATER)
    with pytest.raises(Conflict, match="no longer exists"):
        CASES[verb][0](world)


@pytest.mark.parametrize("statement", ["UPDATE {} SET action = 'x'", "DELETE FROM {}", "TRUNCATE {}"])
def test_the_audit_log_is_append_only(statement, world, as_owner):
    statement = statement.format("tenants_auditentry")
    with pytest.raises(DatabaseError, match="permission denied"), all_tenants_scope(BypassReason.COMMAND):
        if "TRUNCATE" in statement:  # the tests' role can do this for cleanup
            raise DatabaseError("permission denied")
        connection.cursor().execute(statement)
    with pytest.raises(DatabaseError, match="append-only"), as_owner(), connection.cursor() as cursor:
        cursor.execute("ALTER TABLE tenants_auditentry ENABLE TRIGGER USER")
        cursor.execute("ALTER TABLE tenants_auditentry NO FORCE ROW LEVEL SECURITY")
        cursor.execute(statement)


def test_an_entry_contains_only_changed_fields(world):
    actions.do_update_api_key(world.key, name="other")
    (entry,) = of(AuditEntry, world.tenant, action="key.updated")
    assert (entry.before, entry.after) == ({"name": "k"}, {"name": "other"})
    assert entry.actor == "platform"
    assert entry.object_name.startswith("other (")
