"""A real Valkey for asynchronous tests."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest_asyncio
import redis.asyncio as redis


@pytest_asyncio.fixture
async def broker() -> AsyncIterator[redis.Redis]:
    client = redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"], socket_timeout=60)
    await client.flushdb()
    yield client
    await client.aclose()
