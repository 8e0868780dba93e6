"""The broker, as the console and the web jobs ask it: briefly."""

from __future__ import annotations

import redis

from millrace.conf.environment import platform_settings


def connect() -> redis.Redis:
    """Return a client that gives up within a second or two."""
    return redis.Redis.from_url(platform_settings().valkey_url, socket_timeout=1, socket_connect_timeout=1)
