"""Connections to Valkey with short timeouts, for the console and web jobs."""

from __future__ import annotations

import redis
from django.conf import settings


def connect() -> redis.Redis:
    """Return a client whose commands fail within two seconds."""
    return redis.Redis.from_url(settings.MILLRACE.valkey_url, socket_timeout=1, socket_connect_timeout=1)
