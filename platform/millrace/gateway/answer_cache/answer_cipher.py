"""Encryption of cached answers, with a key that is derived for each tenant from a platform secret."""

from __future__ import annotations

import hashlib
import hmac
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

_NONCE_BYTES = 12
_KEY_ID_BYTES = 8


class AnswerCipher:
    """The keys of all tenants. The ID of the secret is stored in front of each ciphertext."""

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._key_id = hashlib.sha256(b"answer cache key\0" + self._secret).digest()[:_KEY_ID_BYTES]
        self._ciphers: dict[int, AESGCM] = {}

    def digest(self, payload: bytes) -> bytes:
        """Return a keyed digest of the payload."""
        return hmac.digest(self._secret, payload, "sha256")

    def seal(self, tenant_id: int, context: bytes, payload: bytes) -> bytes:
        """Encrypt a payload. It can be decrypted only for the same tenant and context."""
        nonce = os.urandom(_NONCE_BYTES)
        return self._key_id + nonce + self._cipher(tenant_id).encrypt(nonce, payload, context)

    def open(self, tenant_id: int, context: bytes, sealed: bytes) -> bytes | None:
        """Return the decrypted payload; None if it is of another secret, tenant or context."""
        from cryptography.exceptions import InvalidTag  # 6 MB in a gateway whose tenants cache no answers

        key_id, nonce = sealed[:_KEY_ID_BYTES], sealed[_KEY_ID_BYTES : _KEY_ID_BYTES + _NONCE_BYTES]
        if key_id != self._key_id:
            return None
        try:
            return self._cipher(tenant_id).decrypt(nonce, sealed[_KEY_ID_BYTES + _NONCE_BYTES :], context)
        except (InvalidTag, ValueError):
            return None

    def _cipher(self, tenant_id: int) -> AESGCM:
        cipher = self._ciphers.get(tenant_id)
        if cipher is None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            key = hmac.digest(self._secret, f"answer cache\0{tenant_id}".encode(), "sha256")
            cipher = self._ciphers[tenant_id] = AESGCM(key)
        return cipher
