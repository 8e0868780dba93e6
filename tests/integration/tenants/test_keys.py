"""API keys: peppers, rotation, ip_allowlist and last use, each also concurrently."""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import call_command
from hypothesis import given
from hypothesis import strategies as st

from tenants import actions, authentication
from tenants.actions import ActionRefused, Conflict
from tenants.keys import ip_allowlist, snapshot
from tenants.models import ApiKey, ApiKeySnapshotRow, ApiKeyUsage, AuditEntry, LimitSet, Project
from tests.support.rows import of, only_project, unscoped
from tests.support.tenants.concurrency import at_once

OLD, NEW = "o" * 40, "n" * 40
HOUR = timedelta(hours=1)


@pytest.fixture
def peppers(settings: Any) -> Callable[..., None]:
    """Return a function that sets MILLRACE_KEY_PEPPERS for this process, newest first."""

    def set_to(*values: str) -> None:
        settings.MILLRACE = dataclasses.replace(settings.MILLRACE, key_peppers=values)

    return set_to


@pytest.fixture
def project(db) -> Project:
    return only_project(actions.do_create_tenant("acme", "Acme"))


def test_the_stored_hash_is_not_the_keys_plain_hash(project):
    key, secret = actions.do_create_api_key(project, "k")
    assert bytes(key.key_hash) != hashlib.sha256(secret.encode()).digest()
    assert len(key.key_hash) == 32
    assert snapshot.pepper_id(OLD) != snapshot.pepper_id(NEW)
    assert len({*snapshot.possible_hashes(secret, (NEW, OLD))}) == 3


def test_peppers_rotate(project, peppers):
    peppers(OLD)
    key, secret = actions.do_create_api_key(project, "k")
    peppers(NEW, OLD)
    assert unscoped(ApiKey).get(pk=key.pk).pepper == snapshot.pepper_id(OLD)
    assert authentication.find_key(secret).pk == key.pk  # found by the old one and stored with the new one
    row = unscoped(ApiKey).get(pk=key.pk)
    assert (row.pepper, bytes(row.key_hash)) == (snapshot.pepper_id(NEW), snapshot.hash_key(secret, NEW))
    assert bytes(unscoped(ApiKeySnapshotRow).get().key_hash) == bytes(row.key_hash)
    peppers(NEW)
    assert authentication.find_key(secret).pk == key.pk
    peppers(OLD)
    assert authentication.find_key(secret) is None


def test_a_revoked_key_is_not_rehashed(project, peppers):
    peppers(OLD)
    key, secret = actions.do_create_api_key(project, "k")
    actions.do_revoke_api_key(key)
    peppers(NEW, OLD)
    assert authentication.find_key(secret).revoked_at is not None
    assert unscoped(ApiKey).get(pk=key.pk).pepper == snapshot.pepper_id(OLD)


def test_keys_from_before_peppers_still_work(project, peppers):
    """They were stored as plain SHA-256 hashes."""
    key, secret = actions.do_create_api_key(project, "k")
    plain = hashlib.sha256(secret.encode()).digest()
    unscoped(ApiKey).update(key_hash=plain, pepper="")
    unscoped(ApiKeySnapshotRow).update(key_hash=plain)
    peppers(NEW)
    out = io.StringIO()
    call_command("rehash_api_keys", stdout=out)
    assert "1 keys stored again" in out.getvalue()
    assert f"pepper 1 ({snapshot.pepper_id(NEW)}): 1 live keys" in out.getvalue()
    assert bytes(unscoped(ApiKey).get().key_hash) == snapshot.hash_key(secret, NEW)
    assert bytes(unscoped(ApiKeySnapshotRow).get().key_hash) == snapshot.hash_key(secret, NEW)
    assert authentication.find_key(secret).pk == key.pk
    assert actions.do_rehash_unpeppered() == 0


@pytest.mark.django_db(transaction=True)
def test_concurrent_uses_rehash_a_key_once(peppers, broker):
    project = only_project(actions.do_create_tenant("acme", "Acme"))
    peppers(OLD)
    key, secret = actions.do_create_api_key(project, "k")
    peppers(NEW, OLD)
    assert [found.pk for found in at_once(*[lambda: authentication.find_key(secret)] * 4)] == [key.pk] * 4
    assert bytes(unscoped(ApiKeySnapshotRow).get().key_hash) == snapshot.hash_key(secret, NEW)
    copy = broker.get(snapshot.valkey_name(snapshot.hash_key(secret, NEW)))
    assert snapshot.decode(copy) == unscoped(ApiKeySnapshotRow).get().decode()


def test_rotation(project, row):
    expires = datetime.now(UTC) + timedelta(days=90)
    old, old_secret = actions.do_create_api_key(
        project, "k", scopes=["inference"], allowed_models=["m"], allowed_ip_ranges=["10.0.0.0/8"], expires_at=expires
    )
    actions.do_set_limits(project.tenant, {"concurrency": 2}, key=old)
    new, secret = actions.do_rotate_api_key(old, HOUR)
    assert new.pk != old.pk
    assert secret != old_secret
    before, after = row(old_secret), row(secret)
    assert (after.scopes, after.models, after.allowed_ip_ranges) == (("inference",), ("m",), ("10.0.0.0/8",))
    now = datetime.now(UTC).timestamp() * 1e6
    assert now + 3.5e9 < before.expires_at < now + 3.7e9
    assert not before.revoked
    assert abs(after.expires_at - expires.timestamp() * 1e6) < 60e6
    assert [limits.concurrency for limits in after.limits.sets] == [2]
    assert {limits.key_id for limits in of(LimitSet, project.tenant)} == {old.pk, new.pk}
    assert unscoped(ApiKey).get(pk=new.pk).replaces_id == old.pk
    with pytest.raises(Conflict, match="already rotated"):
        actions.do_rotate_api_key(old, HOUR)


def test_rotation_never_extends_a_keys_expiry(project):
    soon = datetime.now(UTC) + timedelta(minutes=5)
    key, _ = actions.do_create_api_key(project, "k", expires_at=soon)
    actions.do_rotate_api_key(key, timedelta(days=1))
    assert unscoped(ApiKey).get(pk=key.pk).expires_at == soon


@pytest.mark.parametrize("overlap", [timedelta(seconds=-1), timedelta(days=31)])
def test_rotation_rejects_invalid_keys(project, overlap):
    key, _ = actions.do_create_api_key(project, "k")
    with pytest.raises(ActionRefused, match="overlap"):
        actions.do_rotate_api_key(key, overlap)
    actions.do_revoke_api_key(key)
    with pytest.raises(Conflict, match="revoked or expired"):
        actions.do_rotate_api_key(key, HOUR)


@pytest.mark.django_db(transaction=True)
def test_only_one_of_concurrent_rotations_succeeds():
    project = only_project(actions.do_create_tenant("acme", "Acme"))
    key, _ = actions.do_create_api_key(project, "k")
    found = at_once(*[lambda: actions.do_rotate_api_key(key, HOUR)] * 4)
    assert sorted(isinstance(each, Conflict) for each in found) == [False, True, True, True]
    assert unscoped(ApiKey).count() == 2


@pytest.mark.django_db(transaction=True)
def test_a_concurrent_rotation_and_revocation_leave_consistent_keys(row):
    project = only_project(actions.do_create_tenant("acme", "Acme"))
    for _ in range(4):
        key, old_secret = actions.do_create_api_key(project, "k")
        rotated, revoked = at_once(
            lambda key=key: actions.do_rotate_api_key(key, HOUR), lambda key=key: actions.do_revoke_api_key(key)
        )
        assert revoked is True
        assert row(old_secret).revoked
        if not isinstance(rotated, Conflict):  # it was first, and its new key is valid
            assert not row(rotated[1]).revoked


def test_update(project, row):
    key, secret = actions.do_create_api_key(project, "k")
    actions.do_update_api_key(key, name="other", allowed_ip_ranges=["192.0.2.7", "2001:db8::/32", "192.0.2.7"])
    assert row(secret).allowed_ip_ranges == ("192.0.2.7/32", "2001:db8::/32")
    assert row(secret).version == 2
    actions.do_update_api_key(key, allowed_ip_ranges=None)
    assert row(secret).allowed_ip_ranges is None


@pytest.mark.parametrize(
    "fields",
    [
        {"scopes": []},
        {"scopes": ["omnipotence"]},
        {"expires_at": datetime(2020, 1, 1, tzinfo=UTC)},
        {"allowed_ip_ranges": ["10.0.0.0/33"]},
        {"name": ""},
        {"name": "x" * 201},
        {"cost_center": "x" * 61},
        {"cost_center": "a\nb"},
        {"cost_center": "a\u202fb\u2028c"},
        {"project_id": 1},
        {"revoked_at": None},
    ],
)
def test_update_rejects_invalid_values(project, fields, row):
    key, secret = actions.do_create_api_key(project, "k")
    with pytest.raises(ActionRefused):
        actions.do_update_api_key(key, **fields)
    assert row(secret).version == 1
    actions.do_revoke_api_key(key)
    with pytest.raises(Conflict):
        actions.do_update_api_key(key, name="other")


def test_a_cost_center_is_stored_rotated_and_audited(project):
    key, _ = actions.do_create_api_key(project, "k", cost_center=" 4711 Support ")
    assert key.cost_center == "4711 Support"
    assert actions.do_rotate_api_key(key, HOUR)[0].cost_center == "4711 Support"
    assert actions.do_update_api_key(key, cost_center="").cost_center == ""
    entries = [row for row in of(AuditEntry, project.tenant) if row.action == "key.updated"]
    assert [(row.before["cost_center"], row.after["cost_center"]) for row in entries] == [("4711 Support", "")]


def test_the_cost_centers_of_a_tenant_are_bounded(project, monkeypatch):
    monkeypatch.setattr("tenants.actions.keys.MAX_COST_CENTERS", 2)
    first = actions.do_create_api_key(project, "a", cost_center="1")[0]
    for center in ("2", "2", "1", ""):
        actions.do_create_api_key(project, "k", cost_center=center)
    with pytest.raises(Conflict, match="2 cost centers"):
        actions.do_create_api_key(project, "k", cost_center="3")
    other = only_project(actions.do_create_tenant("beta", "Beta"))
    actions.do_create_api_key(other, "k", cost_center="3")
    with pytest.raises(Conflict):
        actions.do_update_api_key(first, cost_center="3")  # another key has 1
    actions.do_update_api_key(first, cost_center="2")


@given(st.lists(st.ip_addresses(), min_size=1, max_size=5), st.integers(0, 128))
def test_an_address_is_in_its_own_network(found, prefix):
    networks = ip_allowlist.normalize_networks(f"{each}/{min(prefix, each.max_prefixlen)}" for each in found)
    assert all(ip_allowlist.is_allowed(str(each), networks) for each in found)


@pytest.mark.parametrize(
    ("address", "networks", "expected"),
    [
        ("10.1.2.3", None, True),
        (None, None, True),
        ("10.1.2.3", ["10.0.0.0/8"], True),
        ("::ffff:10.1.2.3", ["10.0.0.0/8"], True),
        ("11.1.2.3", ["10.0.0.0/8", "2001:db8::/32"], False),
        ("2001:db8::1", ["2001:db8::/32"], True),
        ("10.1.2.3", [], False),
        (None, ["0.0.0.0/0"], False),
        ("nonsense", ["0.0.0.0/0"], False),
    ],
)
def test_ip_allowlists(address, networks, expected):
    assert ip_allowlist.is_allowed(address, networks) is expected


def test_the_time_of_last_use_only_increases(project):
    key, _ = actions.do_create_api_key(project, "k")
    now = datetime.now(UTC)
    for at in (now, now - HOUR):
        actions.record_key_usage({key.pk: at, 999_999: at})
    assert [use.last_used_at for use in of(ApiKeyUsage, project.tenant)] == [now]
    actions.record_key_usage({key.pk: now + HOUR})
    assert [use.last_used_at for use in of(ApiKeyUsage, project.tenant)] == [now + HOUR]
