"""Upstream credentials: encrypted at rest, never shown, and sealed to the worker processes that need them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis
from django.db import connection, transaction
from rest_framework.test import APIClient

from inference_worker.contract.credentials import WorkerKey, encode_worker_key, sealed_credentials_name, worker_key_name
from inference_worker.worker.credentials import CredentialNeeds, CredentialStore, MissingCredential
from tenants import actions
from tenants.actions.common import ActionRefused, Conflict, FieldRefused
from tenants.actions.credentials import (
    do_create_credential,
    do_reencrypt_credentials,
    do_remove_credential,
    do_rotate_credential,
    do_update_credential,
)
from tenants.credentials import encryption
from tenants.isolation.scopes import tenant_scope
from tenants.models import AuditEntry, Tenant, UpstreamCredential, User
from tenants.tasks import deliver_credentials
from tests.support.rows import of, only_project, unscoped
from tests.support.tenants.concurrency import at_once
from tests.support.tenants.management_api import by_person, by_role

SECRET = "sk-upstream-0123456789abcdef"
NEW_SECRET = "sk-rotated-0123456789abcdef"
WORKER_SECRET = "tests-" + "w" * 44  # as in tests/conftest.py


@pytest.fixture
def operator(db: None) -> APIClient:
    return by_person(User.objects.create_user("op@example.com", is_staff=True))


def store(broker: redis.Redis, *ids: int, process: str = "w.1", secret: str = WORKER_SECRET) -> CredentialStore:
    """Return the store of a worker process that serves the deployment `remote`."""
    return CredentialStore(broker, process, secret, lambda: CredentialNeeds(ids, ("remote",)))


def synchronize(*stores: CredentialStore) -> None:
    for each in stores:
        each.synchronize()
    deliver_credentials()
    for each in stores:
        each.synchronize()


def stored_rows() -> str:
    """Return all rows that a change of a credential writes, as text."""
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL ROLE millrace_system")
        found = []
        for table in ("upstreamcredential", "auditentry", "idempotentresponse", "apikeysnapshot", "changeevent"):
            cursor.execute(f"SELECT t::text FROM tenants_{table} t")  # noqa: S608
            found += [str(row) for row in cursor.fetchall()]
        cursor.execute("SELECT ciphertext FROM tenants_upstreamcredential")
        found += [bytes(row[0]).decode("latin-1") for row in cursor.fetchall()]
        return "\n".join(found)


def contents(broker: redis.Redis) -> bytes:
    """Return everything that Valkey contains."""
    keys = list(broker.scan_iter(count=1000))
    return b"\n".join(b"%s %s" % (key, broker.dump(key) or b"") for key in keys)  # type: ignore[str-bytes-safe]


@pytest.mark.django_db
def test_the_platforms_credentials_are_managed_by_operators_and_never_shown(
    operator: APIClient, acme: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    url = "/api/operator/upstream-credentials"
    said = []

    def call(method: str, path: str, status: int, body: Any = None) -> Any:
        response = getattr(operator, method)(path, body, format="json", headers={"idempotency-key": f"k{len(said)}"})
        said.append(response.content)
        assert response.status_code == status, response.content
        return json.loads(response.content) if response.content else None

    with transaction.atomic():
        row = call("post", url, 201, {"name": "openai", "secret": SECRET, "daily_spend_limit_nano": 5 * 10**9})
        one = f"{url}/{row['id']}"
        assert (row["version"], row["rotated_at"], row["max_concurrency"]) == (1, None, None)
        assert "secret" not in row
        call("post", url, 409, {"name": "openai", "secret": SECRET})
        for body, field in (
            ({"name": "openai2"}, "secret"),
            ({"name": "Bad name", "secret": SECRET}, "name"),
            ({"name": "x", "secret": SECRET + "\n"}, "secret"),
            ({"name": "x", "secret": SECRET, "max_concurrency": 0}, "max_concurrency"),
            ({"name": "x", "secret": SECRET, "models": ["m"]}, "models"),
        ):
            assert field in json.dumps(call("post", url, 400, body)["errors"]), body
        assert call("patch", one, 200, {"max_concurrency": 8, "daily_spend_limit_nano": None})["max_concurrency"] == 8
        call("patch", one, 400, {"secret": NEW_SECRET})
        assert call("post", f"{one}/rotate", 200, {"secret": NEW_SECRET})["version"] == 2
        assert [each["name"] for each in call("get", url, 200)] == ["openai"]
        call("get", one, 200)
        assert SECRET not in stored_rows() and NEW_SECRET not in stored_rows()
        (saved,) = unscoped(UpstreamCredential).all()
        assert encryption.decrypt_secret(saved) == NEW_SECRET
        call("delete", one, 204)
        call("get", one, 404)
    assert not any(SECRET.encode() in each or NEW_SECRET.encode() in each for each in said)
    assert SECRET not in caplog.text and NEW_SECRET not in caplog.text
    entries = [entry.action for entry in unscoped(AuditEntry).filter(object_type="upstreamcredential")]
    assert sorted(entries) == [f"credential.{verb}" for verb in ("created", "removed", "rotated", "updated")]
    assert by_role(acme, "owner").get(url).status_code == 404  # of no use to tenants


@pytest.mark.django_db
def test_a_tenants_own_credentials_are_its_own(operator: APIClient, acme: Tenant, row: Any) -> None:
    other = actions.do_create_tenant("other", "Other")
    admin, stranger = by_role(acme, "admin"), by_role(other, "owner")
    _, key = actions.do_create_api_key(only_project(acme), "k")
    url = "/api/upstream-credentials"
    body = {"name": "own", "secret": SECRET, "models": ["remote", "remote-2"]}
    made = admin.post(url, body, format="json")
    assert made.status_code == 201, made.content
    one = f"{url}/{made.json()['id']}"
    assert row(key).credentials == {"remote": made.json()["id"], "remote-2": made.json()["id"]}
    taken = admin.post(url, body | {"name": "second", "models": ["remote"]}, format="json")
    assert (taken.status_code, "models" in taken.json()["errors"]) == (400, True), taken.content
    assert admin.post(url, body | {"name": "none", "models": []}, format="json").status_code == 400
    for client in (stranger, by_role(acme, "developer"), by_role(acme, "billing")):
        assert client.get(one).status_code in (403, 404)
        assert client.post(f"{one}/rotate", {"secret": NEW_SECRET}, format="json").status_code in (403, 404)
    assert operator.get(f"/api/operator/upstream-credentials/{made.json()['id']}").status_code == 404
    assert operator.get("/api/operator/upstream-credentials").json() == []
    do_create_credential(None, "platform", NEW_SECRET)
    with tenant_scope(other), connection.cursor() as cursor:  # row-level security, without scoped code
        cursor.execute("SELECT count(*) FROM tenants_upstreamcredential")
        assert cursor.fetchone()[0] == 0
    with tenant_scope(acme), connection.cursor() as cursor:
        cursor.execute("SELECT name FROM tenants_upstreamcredential")
        assert cursor.fetchall() == [("own",)]
    assert admin.patch(one, {"models": ["remote"]}, format="json").json()["models"] == ["remote"]
    assert row(key).credentials == {"remote": made.json()["id"]}
    assert admin.delete(one).status_code == 204
    assert row(key).credentials == {}


@pytest.mark.django_db
def test_a_ciphertext_cannot_be_moved_to_another_tenant(acme: Tenant) -> None:
    own = do_create_credential(acme, "own", SECRET, model_names=["remote"])
    platform = do_create_credential(None, "platform", NEW_SECRET)
    platform.ciphertext = own.ciphertext
    with pytest.raises(encryption.NoEncryptionKey):
        encryption.decrypt_secret(platform)


@pytest.mark.django_db(transaction=True)
def test_workers_receive_the_credentials_that_they_need_within_a_delivery(
    broker: redis.Redis, acme: Tenant, caplog: pytest.LogCaptureFixture
) -> None:
    ours = do_create_credential(None, "openai", SECRET)
    do_create_credential(None, "unused", "sk-unused-0123456789")
    own = do_create_credential(acme, "own", "sk-own-0123456789abcdef", model_names=["remote"])
    do_create_credential(acme, "elsewhere", "sk-elsewhere-0123456789", model_names=["local"])
    worker, second = store(broker, ours.pk), store(broker, process="w.2")
    with pytest.raises(MissingCredential, match="not received yet"):
        worker.secret(ours.pk)
    synchronize(worker, second)
    assert (worker.secret(ours.pk), worker.secret(own.pk)) == (SECRET, "sk-own-0123456789abcdef")
    assert len(worker._contents.secrets) == 2 and list(second._contents.secrets) == [own.pk]  # no other
    assert deliver_credentials() == 0  # nothing changed
    do_rotate_credential(ours, NEW_SECRET)  # its commit delivers it
    worker.synchronize()
    assert worker.secret(ours.pk) == NEW_SECRET
    do_remove_credential(own)
    worker.synchronize()
    with pytest.raises(MissingCredential):
        worker.secret(own.pk)
    # A copy of Valkey has no usable secret: not in plain text, and no other process can open the box.
    box = broker.get(sealed_credentials_name("w.1"))
    assert box is not None
    dump = contents(broker)
    for secret in (SECRET, NEW_SECRET, "sk-own-0123456789abcdef", WORKER_SECRET):
        assert secret.encode() not in dump and secret not in caplog.text
    broker.set(sealed_credentials_name("w.2"), box)
    second.synchronize()
    with pytest.raises(MissingCredential):
        second.secret(ours.pk)
    # After a loss of Valkey's data, the process continues with what it has, and a new process gets its own box.
    broker.flushall()
    worker.synchronize()
    assert worker.secret(ours.pk) == NEW_SECRET
    restarted = store(broker, ours.pk)
    synchronize(restarted)
    assert restarted.secret(ours.pk) == NEW_SECRET
    restarted.close()
    assert not broker.exists(sealed_credentials_name("w.1"), worker_key_name("w.1"))


@pytest.mark.django_db(transaction=True)
def test_a_client_of_valkey_without_the_worker_secret_receives_nothing(
    broker: redis.Redis, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ours = do_create_credential(None, "openai", SECRET)
    worker, foreign = store(broker, ours.pk), store(broker, ours.pk, process="evil.1", secret="x" * 40)
    synchronize(worker, foreign)
    assert worker.secret(ours.pk) == SECRET
    assert not broker.exists(sealed_credentials_name("evil.1"))
    # Neither does one that replays the needs of another process with its own key.
    copy = WorkerKey("w.1", foreign._private_key.public_key().public_bytes_raw(), (ours.pk,), ("remote",))
    broker.set(worker_key_name("w.1"), encode_worker_key(copy, "x" * 40))
    broker.delete(sealed_credentials_name("w.1"))
    assert deliver_credentials() == 0
    with pytest.raises(MissingCredential, match="was not received yet"):
        foreign.secret(ours.pk)


@pytest.mark.django_db(transaction=True)
def test_the_encryption_key_is_rotated_without_a_restart(
    broker: redis.Redis, acme: Tenant, settings: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("o" * 40)
    monkeypatch.delenv("MILLRACE_CREDENTIAL_KEYS")
    monkeypatch.setenv("MILLRACE_CREDENTIAL_KEYS_FILE", str(file))
    ours = do_create_credential(None, "openai", SECRET)
    own = do_create_credential(acme, "own", NEW_SECRET, model_names=["remote"])
    file.write_text(f"{'n' * 40},{'o' * 40}")
    assert do_reencrypt_credentials() == 2
    assert do_reencrypt_credentials() == 0
    file.write_text("n" * 40)
    worker = store(broker, ours.pk)
    synchronize(worker)
    assert (worker.secret(ours.pk), worker.secret(own.pk)) == (SECRET, NEW_SECRET)
    file.write_text("x" * 40)  # a lost key: reported, and the credential can be rotated
    with pytest.raises(Conflict, match="not in MILLRACE_CREDENTIAL_KEYS"):
        do_reencrypt_credentials()
    deliver_credentials()
    worker.synchronize()
    assert worker._contents.secrets == {}
    do_rotate_credential(ours, "sk-after-the-loss")
    worker.synchronize()
    assert worker.secret(ours.pk) == "sk-after-the-loss"
    file.write_text("")
    with pytest.raises(Conflict, match="Set MILLRACE_CREDENTIAL_KEYS"):
        do_create_credential(None, "second", SECRET)


@pytest.mark.django_db(transaction=True)
def test_concurrent_changes(acme: Tenant) -> None:
    made = at_once(
        *(lambda n=n: do_create_credential(acme, f"own-{n}", SECRET, model_names=["remote"]) for n in range(3)),
        *(lambda: do_create_credential(None, "openai", SECRET) for _ in range(3)),
    )
    assert sum(isinstance(each, UpstreamCredential) for each in made[:3]) == 1
    assert sum(isinstance(each, UpstreamCredential) for each in made[3:]) == 1
    assert all(isinstance(each, UpstreamCredential | ActionRefused) for each in made)
    (ours,) = (each for each in made[3:] if isinstance(each, UpstreamCredential))
    at_once(*(lambda n=n: do_rotate_credential(ours, f"sk-{n}") for n in range(4)))
    (saved,) = unscoped(UpstreamCredential).filter(pk=ours.pk)
    assert saved.version == 5
    assert encryption.decrypt_secret(saved) in {f"sk-{n}" for n in range(4)}
    ended = at_once(*(lambda: do_remove_credential(ours) for _ in range(2)))
    assert sum(isinstance(each, Conflict) for each in ended) == 1
    with pytest.raises(Conflict):
        do_update_credential(ours, name="gone")
    with pytest.raises(FieldRefused, match="printable"):
        do_create_credential(None, "empty", "")
    assert len(of(UpstreamCredential, acme)) == 1
