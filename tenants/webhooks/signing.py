"""Signatures of webhooks, as Standard Webhooks says. Free of Django.

An endpoint's secret is HMAC-SHA-256 of its nonce under the platform's secret key: neither the table alone nor the key
alone signs anything.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Iterable

PREFIX = "whsec_"


def secret_of(platform_key: str, endpoint_id: int, nonce: str) -> str:
    """Return the secret of an endpoint, as its owner is shown it once."""
    made = hmac.digest(platform_key.encode(), f"webhooks:{endpoint_id}:{nonce}".encode(), hashlib.sha256)
    return PREFIX + base64.b64encode(made).decode()


def signature(secrets: Iterable[str], uid: str, at: int, body: bytes) -> str:
    """Return the header `webhook-signature`: one signature for each secret that is valid. `at`: seconds since 1970."""
    signed = f"{uid}.{at}.".encode() + body
    keys = (base64.b64decode(secret.removeprefix(PREFIX)) for secret in secrets)
    return " ".join(f"v1,{base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()}" for key in keys)
