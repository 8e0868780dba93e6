"""Clients of Valkey. Every client of the platform is created here, from one of the options below.

| options | clients |
|---|---|
| `REQUEST_PATH` | gateway: commands that a request waits for |
| `GATEWAY_READS` | gateway: reads that wait for messages |
| `WORKER` | inference worker: all threads of the process |
| `SETTLER` | settler: reads of the usage stream |
| `PAGES` | console, management API and web jobs: reads, and the copy of the cordons |
| `NOTIFICATIONS` | management API and web jobs: changed key snapshots, announced work |
| `WORK` | beat: wait for announced work |
| `LOGINS` | console: attempts to log in, counted before the password is checked |
| `CONFIRMATIONS` | management API and web jobs: gateways that have applied a change |
| `SUPERVISOR` | `millrace up`: readiness of the embedded server, and exits of workers |
| `STARTUP_CHECK` | `millrace up`: the check of MILLRACE_VALKEY_URL |

Celery's brokers and Django's cache create their own connections.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import redis
import redis.asyncio
import redis.asyncio.retry
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

MAX_CONNECTIONS = 256  # connections of one asynchronous client
MIN_BACKOFF_SECONDS = 0.05  # between retries
MAX_BACKOFF_SECONDS = 0.5


class ClientOptions(NamedTuple):
    """The behavior of a client. Times are in seconds."""

    client_name: str  # in Valkey's CLIENT LIST, with the prefix "millrace-"
    reply_timeout: float
    connect_timeout: float
    retries: int = 0  # repetitions of a command after a connection error or a timeout
    health_check_interval: int = 0  # a connection that was idle for longer is checked before its next command; 0: never
    pool_timeout: float = 0.0  # asynchronous clients: how long a command waits for one of `MAX_CONNECTIONS`
    protocol: int | None = None  # version of RESP; None: redis-py's default


# A request needs at most two replies. Without retries, an unreachable Valkey is reported to the client within a second.
REQUEST_PATH = ClientOptions("gateway", 0.4, 0.4, pool_timeout=0.2)
# Users of this client retry by themselves.
GATEWAY_READS = ClientOptions("gateway-reads", 5, 0.4, health_check_interval=10, pool_timeout=5)
# Retries bridge short outages. Longer ones raise.
WORKER = ClientOptions("worker", 5, 2, retries=3, health_check_interval=10)
# No retries: a repeated read would leave messages pending.
SETTLER = ClientOptions("settler", 5, 2, health_check_interval=10, protocol=2)
PAGES = ClientOptions("pages", 1, 1)
NOTIFICATIONS = ClientOptions("notifications", 2, 2)
WORK = ClientOptions("work", 1, 1)
LOGINS = ClientOptions("logins", 2, 2)
CONFIRMATIONS = ClientOptions("confirmations", 0.5, 0.5)  # a change waits for the gateways for a second
SUPERVISOR = ClientOptions("supervisor", 1, 1)
STARTUP_CHECK = ClientOptions("startup-check", 5, 5)


def connect(url: str, options: ClientOptions) -> redis.Redis:
    """Return a client. It connects at its first command, and can be used by several threads."""
    backoff = ExponentialBackoff(cap=MAX_BACKOFF_SECONDS, base=MIN_BACKOFF_SECONDS)
    return redis.Redis.from_url(url, retry=Retry(backoff, options.retries), **_arguments(options))


def connect_async(url: str, options: ClientOptions) -> redis.asyncio.Redis:
    """Return an asynchronous client. If all connections are in use, commands wait for `pool_timeout`."""
    backoff = ExponentialBackoff(cap=MAX_BACKOFF_SECONDS, base=MIN_BACKOFF_SECONDS)
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        max_connections=MAX_CONNECTIONS,
        timeout=options.pool_timeout,
        retry=redis.asyncio.retry.Retry(backoff, options.retries),
        **_arguments(options),
    )
    return redis.asyncio.Redis.from_pool(pool)


def _arguments(options: ClientOptions) -> dict[str, Any]:
    """Return redis-py's arguments. Keepalive finds connections that a network device has dropped."""
    return {
        "client_name": f"millrace-{options.client_name}",
        "socket_timeout": options.reply_timeout,
        "socket_connect_timeout": options.connect_timeout,
        "socket_keepalive": True,
        "health_check_interval": options.health_check_interval,
        "protocol": options.protocol,
    }
