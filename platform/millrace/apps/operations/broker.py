"""Connections to Valkey with short timeouts, for the console and web jobs."""

from __future__ import annotations

import redis

from millrace.conf.environment import platform_settings


def connect() -> redis.Redis:
    """Return a client whose commands fail within two seconds."""
    return redis.Redis.from_url(platform_settings().valkey_url, socket_timeout=1, socket_connect_timeout=1)
