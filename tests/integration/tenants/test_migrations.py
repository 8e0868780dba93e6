"""From the first release's tables to these and back, with rows in them."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from django.core.management import call_command
from django.db import connection

from billing.pricing import rating
from tenants import actions, authentication
from tenants.keys import snapshot
from tenants.models import KeySnapshot, Tenant
from tests.support.rows import Everybody, allow_emptying

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "owner"])
SECRET = "sk-mr-from-the-first-release"
ROWS = """
INSERT INTO tenants_tenant (id, slug, name, status, is_demo, created_at)
    VALUES (9001, 'old', 'Old', 'active', false, now()), (9002, 'older', 'Older', 'suspended', false, now());
INSERT INTO tenants_project (id, tenant_id, slug, name, created_at)
    VALUES (9001, 9001, 'default', 'Default', now()), (9002, 9002, 'default', 'Default', now());
INSERT INTO tenants_apikey (id, tenant_id, project_id, name, prefix, key_hash, scopes, created_at)
    VALUES (9001, 9001, 9001, 'k', 'sk-mr-from-t', %(hash)s, '{inference,manage}', now()),
           (9002, 9002, 9002, 'k', 'sk-mr-other', 'other', '{inference}', now());
INSERT INTO tenants_keysnapshot (key_hash, version, payload, key_id)
    VALUES (%(hash)s, 3, %(payload)s, 9001), ('other', 1, %(payload)s, 9002);
"""
PAYLOAD = {  # as the first release wrote it
    **{"key_id": 9001, "tenant_id": 9001, "project_id": 9001, "tenant_slug": "old", "scopes": ["inference", "manage"]},
    **{"models": None, "expires_at": None, "revoked": False, "suspended": False, "limits": {}, "version": 3},
}


@pytest.fixture
def first_release(as_owner, transactional_db) -> Any:
    call_command("migrate", "tenants", "0001", verbosity=0)
    try:
        yield
    finally:
        call_command("migrate", verbosity=0)
        rating._raters.clear()  # price rate cards are numbered from 1 again
        with as_owner(), connection.cursor() as cursor:
            allow_emptying(cursor)


def test_rows_of_the_first_release_live_on(first_release, as_owner):
    stored = hashlib.sha256(SECRET.encode()).digest()
    with as_owner(), connection.cursor() as cursor:
        cursor.execute(ROWS, {"hash": stored, "payload": msgspec.msgpack.encode(PAYLOAD)})
    call_command("migrate", verbosity=0)
    rows = {row.key_id: row for row in Everybody(KeySnapshot).all()}
    assert {key_id: row.tenant_id for key_id, row in rows.items()} == {9001: 9001, 9002: 9002}
    assert rows[9001].decoded().allowed_addresses is None
    assert bytes(rows[9001].key_hash) in snapshot.possible_hashes(SECRET, ["p" * 40])  # a gateway finds it
    key = authentication.find_key(SECRET)  # and so does the management API, which stores it with a pepper
    assert key.pk == 9001
    assert bytes(Everybody(KeySnapshot).get(key_id=9001).key_hash) != stored
    assert Everybody(KeySnapshot).get(key_id=9001).version == 4
    actions.do_resume_tenant(Everybody(Tenant).get(slug="older"))
    assert not Everybody(KeySnapshot).get(key_id=9002).decoded().suspended
