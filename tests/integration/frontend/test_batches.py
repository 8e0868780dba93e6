"""Batches and files in the console: upload, progress, errors by line, cancellation and download."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import AsyncClient

from millrace.apps.batches import tenant_actions
from millrace.apps.batches.actions import do_advance, storage
from millrace.apps.batches.models import Batch, File, Line
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import ApiKey, AuditEntry, Tenant, User
from tests.support.rows import of, only_project

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.acme(signed_in="developer")]
LINES = [
    {"custom_id": f"n{number}", "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": "x"}}
    for number in range(3)
]
INPUT = b"".join(json.dumps(line).encode() + b"\n" for line in LINES)


@pytest.fixture(autouse=True)
def files(settings: Any, tmp_path: Path) -> None:
    """Store files in a directory of the test."""
    settings.MILLRACE = replace(settings.MILLRACE, data_dir=tmp_path)


@pytest.fixture
def key(acme: Tenant) -> ApiKey:
    return actions.do_create_api_key(only_project(acme), "prod")[0]


def upload(client: Any, used: ApiKey, body: bytes = INPUT, **changes: Any) -> Any:
    form = {"upload": SimpleUploadedFile("night.jsonl", body), "endpoint": "/v1/embeddings", "key": used.pk, **changes}
    return client.post("/t/acme/batches/new", form)


def get(client: Any, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200
    page: str = response.content.decode()
    assert "did not load" not in page
    return page


def test_a_batch_from_its_upload_to_its_results(client, acme, key):
    response = upload(client, key)
    assert response.status_code == 303
    (batch,), (file,) = of(Batch, acme), of(File, acme)
    assert (batch.key_id, batch.endpoint, batch.input_file, file.filename, file.size) == (
        *(key.pk, "/v1/embeddings", file.name, "night.jsonl", len(INPUT)),
    )
    path = f"/t/acme/batches/{batch.name}/"
    assert response.url == path
    do_advance(batch.pk)
    assert "0 of 3" in get(client, path)
    error = json.dumps({"error": {"message": "The model <m> does not exist."}}).encode()
    answers = {0: (200, b'{"usage": {"prompt_tokens": 5}}'), 1: (404, error), 2: (200, b"{}")}
    with all_tenants_scope(BypassReason.BATCHES):
        for number, (status, answer) in list(answers.items())[:2]:
            rows = Line.objects.all_tenants().filter(batch=batch, number=number)
            rows.update(state="answered", status=status, answer=answer, request_id="r")
    page = get(client, path)
    assert "2 of 3" in page and "The model &lt;m&gt; does not exist." in page and ">n1<" in page
    with all_tenants_scope(BypassReason.BATCHES):
        rows = Line.objects.all_tenants().filter(batch=batch, number=2)
        rows.update(state="answered", status=200, answer=b"{}", request_id="r")
    do_advance(batch.pk)
    page = get(client, path)
    assert "Completed" in page and "3 of 3" in page
    assert "The model &lt;m&gt; does not exist." in page  # from the error file
    assert "Cancel batch" not in page
    assert client.post(f"{path}cancel").status_code == 422
    storage().remove(of(Batch, acme)[0].error_file)
    assert "No errors" in get(client, path)


def test_an_invalid_file_shows_its_errors(client, acme, key):
    upload(client, key, INPUT + b"no json\n")
    (batch,) = of(Batch, acme)
    do_advance(batch.pk)
    page = get(client, f"/t/acme/batches/{batch.name}/")
    assert "Failed" in page and "invalid_json_line" in page and ">4</td>" in page


@pytest.mark.parametrize(
    ("body", "changes", "message"),
    [
        (b"", {}, "empty"),
        (INPUT, {"endpoint": "/v1/none"}, "not one of the available choices"),
        (INPUT, {"key": 999_999}, "not one of the available choices"),
        (INPUT, {"upload": ""}, "Upload a file, or choose one"),
        (INPUT, {"upload": "", "file": "file-other"}, "not one of the available choices"),
    ],
)
def test_the_form_shows_its_errors_and_stores_nothing(client, acme, key, body, changes, message):
    response = upload(client, key, body, **changes)
    assert response.status_code == 422
    assert message in response.content.decode()
    assert of(File, acme) == of(Batch, acme) == []
    assert list(storage().find_old(-1)) == []


def test_uploads_are_bounded(client, acme, key, monkeypatch, settings):
    for name, most in (("MAX_FILE_BYTES", 10), ("MAX_LINES", 2)):
        with monkeypatch.context() as patch:
            patch.setattr(tenant_actions, name, most)
            assert upload(client, key).status_code == 422
    assert upload(client, key).status_code == 303
    settings.MILLRACE = replace(settings.MILLRACE, tenant_file_quota_bytes=len(INPUT) + 1)
    response = upload(client, key)
    assert response.status_code == 422
    assert "Delete some files first" in response.content.decode()
    assert len(of(File, acme)) == len(list(storage().find_old(-1))) == 1


def test_a_cancelled_batch_stays_cancelled_and_is_audited(client, acme, key):
    upload(client, key)
    (batch,) = of(Batch, acme)
    for _ in range(2):
        assert client.post(f"/t/acme/batches/{batch.name}/cancel").status_code == 303
    assert of(Batch, acme)[0].status == "cancelling"
    actions_seen = [row.action for row in of(AuditEntry, acme) if row.action.startswith(("batch.", "file."))]
    assert sorted(actions_seen) == ["batch.cancelled", "batch.created", "file.created"]


def test_a_file_that_a_batch_reads_is_not_deleted(client, acme, key):
    upload(client, key)
    (file,), (batch,) = of(File, acme), of(Batch, acme)
    assert client.post(f"/t/acme/files/{file.name}/delete").status_code == 422
    client.post(f"/t/acme/batches/{batch.name}/cancel")
    do_advance(batch.pk)
    assert client.post(f"/t/acme/files/{file.name}/delete").status_code == 303
    assert of(File, acme) == []
    assert not storage().path(file.name).exists()


async def test_a_file_is_sent_in_parts(monkeypatch):
    monkeypatch.setattr("tenants.file_responses._PART_BYTES", 7)

    def prepare() -> tuple[User, str]:
        tenant = actions.do_create_tenant("acme", "Acme")
        user = User.objects.create_user("dev@example.com")
        actions.do_add_member(tenant, user, "developer")
        return user, tenant_actions.do_upload_file(only_project(tenant), 'a"b.jsonl', [INPUT]).name

    user, name = await sync_to_async(prepare)()
    client = AsyncClient()
    await client.aforce_login(user)
    response = await client.get(f"/t/acme/files/{name}/content")
    assert response.headers["Content-Length"] == str(len(INPUT))
    parts = [part async for part in response.streaming_content]
    assert b"".join(parts) == INPUT
    assert len(parts) > 10


def test_readers_see_batches_and_no_contents(client, acme, key):
    upload(client, key)
    (file,), (batch,) = of(File, acme), of(Batch, acme)
    reader = User.objects.create_user("reader@example.com")
    actions.do_add_member(acme, reader, "readonly")
    client.force_login(reader)
    page = get(client, "/t/acme/batches/") + get(client, f"/t/acme/batches/{batch.name}/")
    assert "/content" not in page and "Cancel batch" not in page and "/new" not in page
    for path in (
        "batches/new",
        f"batches/{batch.name}/cancel",
        f"files/{file.name}/content",
        f"files/{file.name}/delete",
    ):
        assert client.get(f"/t/acme/{path}").status_code == 403


def test_a_key_of_another_project_cannot_read_the_file(acme, key):
    other = actions.do_create_api_key(actions.do_create_project(acme, "other", "Other"), "k")[0]
    row = tenant_actions.do_upload_file(key.project, "f", [INPUT])
    with pytest.raises(actions.ActionRefused, match="does not exist in the key’s project"):
        tenant_actions.do_create_batch(acme, row.name, other, "/v1/embeddings")
    actions.do_revoke_api_key(key)
    with tenant_scope(acme):
        revoked = ApiKey.objects.for_tenant(acme).get(pk=key.pk)
    with pytest.raises(actions.ActionRefused, match="revoked"):
        tenant_actions.do_create_batch(acme, row.name, revoked, "/v1/embeddings")


def test_lists_are_filtered_by_chips(client, acme, key):
    upload(client, key)
    (batch,) = of(Batch, acme)
    assert batch.name[:22] in get(client, "/t/acme/batches/?status=validating")
    assert "No batch matches" in get(client, "/t/acme/batches/?status=completed")
    with tenant_scope(acme):
        File.objects.for_tenant(acme).update(expires_at=datetime.now(UTC) - timedelta(1))
    assert "No files" in get(client, "/t/acme/batches/")
