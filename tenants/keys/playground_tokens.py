"""Playground tokens: a user can use an API key from a browser for some minutes without its secret. No Django.

The console creates a signed token for a user who may use the key. A gateway accepts it once, as the first message of a
WebSocket. Requests on the WebSocket count as the key's: its limits, budgets and usage. The token names its user and is
valid for nothing else.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
from datetime import datetime, timedelta

import msgspec

TAKEN_WITHIN = timedelta(seconds=60)  # after its creation
LASTS = timedelta(minutes=15)  # later requests on its WebSocket are rejected
MAX_TOKEN_LENGTH = 1024  # characters
_PURPOSE = b"millrace playground token 1\0"


class PlaygroundToken(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a playground token. Times are in microseconds since 1970, UTC."""

    key_id: int
    tenant_id: int
    user_id: int
    given_at: int
    nonce: bytes
    generation: int = 0  # the user's `session_generation`; the token ends with the user's sessions

    @property
    def name(self) -> str:
        """Return the name under which the used token is stored."""
        return f"playground-token:{self.nonce.hex()}"

    def may_be_taken(self, now: int) -> bool:
        return self.given_at <= now + 5_000_000 and now < self.given_at + TAKEN_WITHIN // timedelta(microseconds=1)

    def holds(self, now: int) -> bool:
        """Return whether requests on its WebSocket are still allowed."""
        return now < self.given_at + LASTS // timedelta(microseconds=1)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PlaygroundToken).decode


def give(secret: str, *, key_id: int, tenant_id: int, user_id: int, now: datetime, generation: int = 0) -> str:
    """Return a new token as text, signed with the platform's secret."""
    given_at = int(now.timestamp()) * 1_000_000 + now.microsecond
    body = _encode(PlaygroundToken(key_id, tenant_id, user_id, given_at, secrets.token_bytes(16), generation))
    return base64.urlsafe_b64encode(_sign(secret, body) + body).decode()


def read(secret: str, text: str) -> PlaygroundToken | None:
    """Return the token if its signature is valid. The caller must check whether it is expired or used."""
    if len(text) > MAX_TOKEN_LENGTH:
        return None
    try:
        whole = base64.urlsafe_b64decode(text.encode("ascii"))
        if not hmac.compare_digest(whole[:32], _sign(secret, whole[32:])):
            return None
        return _decode(whole[32:])
    except (UnicodeEncodeError, binascii.Error, msgspec.MsgspecError):
        return None


def _sign(secret: str, body: bytes) -> bytes:
    return hmac.digest(secret.encode(), _PURPOSE + body, "sha256")
