"""Signatures of webhooks (Standard Webhooks). Does not import Django.

An endpoint's secret is the HMAC-SHA-256 of its nonce with the platform's secret key. Neither the table nor the key is
enough to sign.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable

PREFIX = "whsec_"


def secret_of(platform_key: str, endpoint_id: int, nonce: str) -> str:
    """Return the secret of an endpoint in the form that is shown to its owner."""
    digest = hmac.digest(platform_key.encode(), f"webhooks:{endpoint_id}:{nonce}".encode(), hashlib.sha256)
    return PREFIX + base64.b64encode(digest).decode()


def signature(secrets: Iterable[str], public_id: str, timestamp: int, body: bytes) -> str:
    """Return the header `webhook-signature`: one signature per secret. `timestamp`: seconds since 1970."""
    signed = f"{public_id}.{timestamp}.".encode() + body
    keys = (base64.b64decode(secret.removeprefix(PREFIX)) for secret in secrets)
    return " ".join(f"v1,{base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()}" for key in keys)
