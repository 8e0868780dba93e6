"""Encryption of upstream credentials and of the secrets of alert channels at rest.

The keys are in MILLRACE_CREDENTIAL_KEYS, the newest first. A row names the key of its ciphertext, so older keys decrypt
until every row was encrypted again. The cipher's key also depends on the tenant, so a ciphertext that is copied to a
row of another tenant cannot be decrypted.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from typing import Any, Protocol

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings


class EncryptedRow(Protocol):
    """A row with a secret."""

    pk: Any
    tenant_id: Any
    ciphertext: Any
    encryption_key_id: Any


class NoEncryptionKey(Exception):
    """An error for a missing or wrong key of MILLRACE_CREDENTIAL_KEYS."""


def encrypt_secret(row: EncryptedRow, secret: str) -> None:
    """Encrypt the secret with the newest key into the row, which is not saved.

    Raises:
        NoEncryptionKey: no key is set.
    """
    keys = _keys()
    if not keys:
        raise NoEncryptionKey("Set MILLRACE_CREDENTIAL_KEYS, for example to the output of `openssl rand -base64 36`.")
    row.encryption_key_id = key_id(keys[0])
    row.ciphertext = _cipher(keys[0], row.tenant_id).encrypt(secret.encode())


def decrypt_secret(row: EncryptedRow) -> str:
    """Return the row's secret.

    Raises:
        NoEncryptionKey: the row's key is not set, or the ciphertext was changed.
    """
    key = next((key for key in _keys() if key_id(key) == row.encryption_key_id), None)
    if key is None:
        raise NoEncryptionKey(
            f"The credential {row.pk} is encrypted with the key {row.encryption_key_id}, which is not in"
            " MILLRACE_CREDENTIAL_KEYS. Add the key, or rotate the credential."
        )
    try:
        return _cipher(key, row.tenant_id).decrypt(bytes(row.ciphertext)).decode()
    except InvalidToken as exc:
        raise NoEncryptionKey(f"The credential {row.pk} cannot be decrypted. Rotate it.") from exc


def known_key_ids() -> list[str]:
    """Return the IDs of the keys, newest first."""
    return [key_id(key) for key in _keys()]


def key_id(key: str) -> str:
    """Return the ID of an encryption key, which does not reveal it."""
    return hashlib.sha256(b"millrace credential key\0" + key.encode()).hexdigest()[:8]


def _keys() -> Sequence[str]:
    keys: Sequence[str] = settings.READ_CREDENTIAL_KEYS()
    return keys


def _cipher(key: str, tenant_id: int | None) -> Fernet:
    owner = "platform" if tenant_id is None else f"tenant {tenant_id}"
    derived = hmac.digest(key.encode(), f"millrace upstream credential\0{owner}".encode(), "sha256")
    return Fernet(base64.urlsafe_b64encode(derived))
