"""Tickets: a person's leave to use one API key from a browser for some minutes, without its secret. Free of Django.

The console gives one to a user who may use the key, and a gateway takes it, once, as a WebSocket's first message. What
the socket asks is then the key's: its limits and budgets, its usage. A ticket says who it was given to, is signed, and
opens nothing but that socket.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
from datetime import datetime, timedelta

import msgspec

TAKEN_WITHIN = timedelta(seconds=60)  # from when it was given
LASTS = timedelta(minutes=15)  # the socket it opened: what is asked later is refused
MAX_TOKEN_LENGTH = 1024  # characters
_PURPOSE = b"millrace ticket 1\0"


class PlaygroundToken(msgspec.Struct, frozen=True, array_like=True):
    """Times are microseconds since 1970, UTC."""

    key_id: int
    tenant_id: int
    user_id: int
    given_at: int
    nonce: bytes
    generation: int = 0  # the user's `session_generation`: a ticket ends with the user's sessions

    @property
    def name(self) -> str:
        """What it is known by once it was taken."""
        return f"ticket:{self.nonce.hex()}"

    def may_be_taken(self, now: int) -> bool:
        return self.given_at <= now + 5_000_000 and now < self.given_at + TAKEN_WITHIN // timedelta(microseconds=1)

    def holds(self, now: int) -> bool:
        """Whether something may still be asked on the socket it opened."""
        return now < self.given_at + LASTS // timedelta(microseconds=1)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PlaygroundToken).decode


def give(secret: str, *, key_id: int, tenant_id: int, user_id: int, now: datetime, generation: int = 0) -> str:
    """Return a fresh ticket as text, signed with the platform's secret."""
    given_at = int(now.timestamp()) * 1_000_000 + now.microsecond
    body = _encode(PlaygroundToken(key_id, tenant_id, user_id, given_at, secrets.token_bytes(16), generation))
    return base64.urlsafe_b64encode(_sign(secret, body) + body).decode()


def read(secret: str, text: str) -> PlaygroundToken | None:
    """Return the ticket, if it is one of ours. Whether it may still be taken is for the caller to ask."""
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
