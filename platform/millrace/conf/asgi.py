"""The ASGI application: /v1 and the health endpoints are served by the gateway, all other URLs by Django."""

from __future__ import annotations

import os
from typing import Any

from channels.routing import ProtocolTypeRouter, URLRouter
from django.core.asgi import get_asgi_application
from django.urls import re_path

from inference_worker.contract.optional_imports import without_packages

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "millrace.conf.settings")
with without_packages("requests", "pygments"):  # for the framework's own documentation: 6 MB
    import rest_framework.compat  # noqa: F401
django_application = get_asgi_application()

from millrace.conf.console_bodies import BoundedBodies  # noqa: E402 - Django is set up first
from millrace.conf.request_slots import LimitedRequests  # noqa: E402
from millrace.conf.web_database import use_web_pools  # noqa: E402
from millrace.gateway.app import lifespan, running_gateway  # noqa: E402
from millrace.gateway.http.client_paths import with_client_paths  # noqa: E402
from millrace.gateway.routes import ROUTES, SOCKETS  # noqa: E402

use_web_pools()
web_application: Any = BoundedBodies(LimitedRequests(django_application, lambda: running_gateway().callers))
application = ProtocolTypeRouter(
    {
        "http": with_client_paths(URLRouter([*ROUTES, re_path("", web_application)])),
        "websocket": URLRouter(SOCKETS),
        "lifespan": lifespan,
    }
)
