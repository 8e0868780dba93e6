"""Actions on upstream credentials, of the platform and of tenants."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from django.db import IntegrityError, connection, transaction

from inference_worker.contract.settings import MODEL_NAME
from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions.common import ActionRefused, Conflict, FieldRefused, insert, locked_tenant
from tenants.credentials.delivery import deliver_after_change
from tenants.credentials.encryption import NoEncryptionKey, decrypt_secret, encrypt_secret, known_key_ids
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.keys.key_snapshots import rebuild_key_snapshots
from tenants.models import MAX_SECRET_LENGTH, ChangeEventRow, Tenant, UpstreamCredential, WebhookEndpoint

MAX_CREDENTIALS = 20  # per tenant
MAX_PLATFORM_CREDENTIALS = 256
MAX_MODELS = 100  # models of a credential
_LOCK = 0x75706372  # the number of an advisory lock; unique in the database
CHANGEABLE = ("name", "model_names", "daily_spend_limit_nano", "max_concurrency")


def do_create_credential(tenant: Tenant | None, name: str, secret: str, **options: Any) -> UpstreamCredential:
    """Store a secret for upstreams, of a tenant or of the platform.

    Args:
        options: those of CHANGEABLE. A tenant's credential needs `model_names`; others have none.

    Raises:
        FieldRefused: a value is not valid. Conflict: the name is taken, or there are too many credentials.
    """
    check_secret(secret)
    with _owner_locked(None if tenant is None else tenant.pk) as owner:
        row = UpstreamCredential(tenant=owner, name=name, **options)
        if _rows(row.tenant_id).count() >= (MAX_PLATFORM_CREDENTIALS if owner is None else MAX_CREDENTIALS):
            raise Conflict(Text("The maximum number of credentials is reached. Remove one first."))
        _check(row)
        _encrypt(row, secret)
        insert(
            row, Text("A credential named %(name)s exists already. Choose another name, or rotate it.", name=repr(name))
        )
        audit.record("credential.created", row, tenant_id=row.tenant_id, after=audit.serialize_for_audit(row))
        _apply(owner)
    return row


def do_update_credential(credential: UpstreamCredential, **changes: Any) -> UpstreamCredential:
    """Change the name, the models or the limits of a credential.

    Raises:
        FieldRefused: a value is not valid. Conflict: the name is taken, or the credential no longer exists.
    """
    if unknown := sorted(set(changes) - set(CHANGEABLE)):
        raise ActionRefused(Text("%(unknown)s cannot be changed.", unknown=", ".join(unknown)))
    with _owner_locked(credential.tenant_id) as owner:
        row = _lock_credential(credential)
        before = audit.serialize_for_audit(row)
        for field, value in changes.items():
            setattr(row, field, value)
        _check(row)
        if _rows(row.tenant_id).filter(name=row.name).exclude(pk=row.pk).exists():
            raise Conflict(
                Text("A credential named %(name)s exists already. Choose another name.", name=repr(row.name))
            )
        row.save(update_fields=list(changes))
        after = audit.serialize_for_audit(row)
        audit.record("credential.updated", row, tenant_id=row.tenant_id, before=before, after=after)
        _apply(owner)
    return row


def do_rotate_credential(credential: UpstreamCredential, secret: str) -> UpstreamCredential:
    """Replace the secret. Workers use the new one within seconds.

    Answers that requests with a tenant's earlier secret have cached are not used any more.

    Raises:
        FieldRefused: the secret is not valid. Conflict: the credential no longer exists.
    """
    check_secret(secret)
    with _owner_locked(credential.tenant_id) as owner:
        row = _lock_credential(credential)
        before = audit.serialize_for_audit(row)
        _encrypt(row, secret)
        row.version, row.rotated_at = row.version + 1, datetime.now(UTC)
        row.save(update_fields=["ciphertext", "encryption_key_id", "version", "rotated_at"])
        after = audit.serialize_for_audit(row)
        audit.record("credential.rotated", row, tenant_id=row.tenant_id, before=before, after=after)
        _apply(owner)
    return row


def do_remove_credential(credential: UpstreamCredential) -> None:
    """Remove a credential. Workers forget it within seconds.

    Raises:
        Conflict: a deployment uses it, or it no longer exists.
    """
    with _owner_locked(credential.tenant_id) as owner:
        row = _lock_credential(credential)
        entry = audit.serialize_for_audit(row)
        pk = row.pk
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                row.delete()
                cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")  # otherwise checked at the commit
        except IntegrityError as exc:
            raise Conflict(Text("A deployment uses this credential. Change or remove the deployment first.")) from exc
        row.pk = pk  # for the audit entry
        audit.record("credential.removed", row, tenant_id=row.tenant_id, before=entry)
        _apply(owner)


def do_reencrypt_credentials() -> int:
    """Encrypt all credentials and secrets of channels with the newest key. Returns the number of changed rows.

    Raises:
        Conflict: no key is set, or the key of a credential is missing.
    """
    known = known_key_ids()
    count = 0
    with all_tenants_scope(BypassReason.OPERATOR):
        rows = UpstreamCredential.objects.all_tenants().exclude(encryption_key_id=known[0] if known else "")
        for row in rows.select_for_update().order_by("pk"):
            before = {"encryption_key_id": row.encryption_key_id}
            try:
                encrypt_secret(row, decrypt_secret(row))
            except NoEncryptionKey as exc:
                raise Conflict(text_of(exc)) from exc
            row.save(update_fields=["ciphertext", "encryption_key_id"])
            after = {"encryption_key_id": row.encryption_key_id}
            audit.record("credential.reencrypted", row, tenant_id=row.tenant_id, before=before, after=after)
            count += 1
        channels = WebhookEndpoint.objects.all_tenants().exclude(ciphertext=None)
        for channel in channels.exclude(encryption_key_id=known[0] if known else "").select_for_update().order_by("pk"):
            try:
                encrypt_secret(channel, decrypt_secret(channel))
            except NoEncryptionKey as exc:
                raise Conflict(text_of(exc)) from exc
            channel.save(update_fields=["ciphertext", "encryption_key_id"])
            count += 1
    return count


def check_secret(secret: str) -> None:
    """Check that a secret can be sent in a header.

    Raises:
        FieldRefused: it cannot. The message does not contain the secret.
    """
    if not (1 <= len(secret) <= MAX_SECRET_LENGTH and re.fullmatch(r"[\x21-\x7e]+", secret)):
        message = Text(
            "Enter 1 to %(max_length)s printable ASCII characters without spaces.",
            max_length=MAX_SECRET_LENGTH,
        )
        raise FieldRefused("secret", "invalid", message)


@contextmanager
def _owner_locked(tenant_id: int | None) -> Iterator[Tenant | None]:
    """Open a transaction and lock the tenant that owns a credential; None: the platform."""
    if tenant_id is not None:
        with locked_tenant(tenant_id) as tenant:
            yield tenant
        return
    with all_tenants_scope(BypassReason.OPERATOR), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        yield None


def _rows(tenant_id: int | None) -> Any:
    if tenant_id is None:
        return UpstreamCredential.objects.all_tenants().filter(tenant=None)
    return UpstreamCredential.objects.for_tenant(tenant_id)


def _lock_credential(credential: UpstreamCredential) -> UpstreamCredential:
    row: UpstreamCredential | None = _rows(credential.tenant_id).select_for_update().filter(pk=credential.pk).first()
    if row is None:
        raise Conflict(Text("This credential no longer exists."))
    return row


def _check(row: UpstreamCredential) -> None:
    """Check the values of a credential except its secret.

    Raises:
        FieldRefused: names the field.
    """
    if not re.fullmatch(MODEL_NAME, row.name):
        raise FieldRefused("name", "invalid", Text("Enter 1 to 64 of a-z 0-9 . _ - that start with a letter or digit."))
    if row.daily_spend_limit_nano is not None and not 0 <= row.daily_spend_limit_nano < 2**63:
        raise FieldRefused(
            "daily_spend_limit_nano", "invalid", Text("Enter an amount of at least 0, or null for no limit.")
        )
    if row.max_concurrency is not None and not 1 <= row.max_concurrency <= 100_000:
        raise FieldRefused("max_concurrency", "invalid", Text("Enter a number from 1 to 100000, or null for no limit."))
    row.model_names = sorted(set(row.model_names))
    if row.tenant_id is None:
        if row.model_names:
            raise FieldRefused("models", "invalid", Text("Deployments name the platform's credentials. Remove models."))
        return
    if not 1 <= len(row.model_names) <= MAX_MODELS or not all(
        re.fullmatch(MODEL_NAME, name) for name in row.model_names
    ):
        raise FieldRefused(
            "models",
            "invalid",
            Text("Enter the names of 1 to %(max_models)s models that use this credential.", max_models=MAX_MODELS),
        )
    others = _rows(row.tenant_id).exclude(pk=row.pk).filter(model_names__overlap=row.model_names)
    if (other := others.first()) is not None:
        names = ", ".join(sorted(set(other.model_names) & set(row.model_names)))
        raise FieldRefused(
            "models",
            "taken",
            Text("The credential %(name)s is already used for %(names)s.", name=repr(other.name), names=names),
        )


def _encrypt(row: UpstreamCredential, secret: str) -> None:
    try:
        encrypt_secret(row, secret)
    except NoEncryptionKey as exc:
        raise Conflict(text_of(exc)) from exc


def _apply(owner: Tenant | None) -> None:
    """Send the change to the workers first, then to the gateways."""
    transaction.on_commit(deliver_after_change)
    if owner is not None:
        rebuild_key_snapshots(owner, ChangeEventRow.ChangeType.CREDENTIAL)
