"""Django's database connections in the gateway process.

The console and the management API share a pool. Sign-in has a pool of its own, so that it works while the other one is
exhausted. Statements of both are canceled after MILLRACE_STATEMENT_TIMEOUT_SECONDS. Web jobs and commands use the
connections of `DATABASES`, without this limit.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from django.conf import settings
from django.core.handlers.asgi import ASGIHandler
from django.core.signals import request_started
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.backends.postgresql.base import DatabaseWrapper

WEB, SIGN_IN = "web", "sign_in"
SIGN_IN_PATHS = ("/login", "/logout", "/account/", "/invitations/")
SIGN_IN_CONNECTIONS = 4


def use_web_pools() -> None:
    """Use these pools for all requests that Django's ASGI handler serves in this process."""
    request_started.connect(_use_pool, sender=ASGIHandler)


def pool_of(path: str) -> str:
    """Return the name of the pool that serves a path."""
    return SIGN_IN if path.startswith(SIGN_IN_PATHS) else WEB


def _use_pool(*, scope: Any, **_: Any) -> None:
    """Replace the connection of the request's thread. Django runs each request in a thread of its own."""
    name = pool_of(scope["path"])
    connections[DEFAULT_DB_ALIAS] = DatabaseWrapper(_parameters(name), alias=name)  # the alias names the pool


@cache
def _parameters(name: str) -> dict[str, Any]:
    parameters = connections.settings[DEFAULT_DB_ALIAS]
    options = parameters["OPTIONS"]
    pool = options["pool"]
    if name == SIGN_IN:
        pool = {**pool, "max_size": SIGN_IN_CONNECTIONS}
    timeout_ms = settings.MILLRACE.statement_timeout_seconds * 1000
    session = f"{options.get('options', '')} -c statement_timeout={timeout_ms}".strip()
    return {**parameters, "OPTIONS": {**options, "options": session, "pool": pool}}
