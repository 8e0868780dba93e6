"""What the ASGI server serves: /v1 and the health endpoints by the gateway's consumers, all else by Django."""

from __future__ import annotations

import os

from channels.routing import ProtocolTypeRouter, URLRouter
from django.core.asgi import get_asgi_application
from django.urls import path, re_path

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "millrace.settings")
django_application = get_asgi_application()

from millrace.gateway.app import lifespan  # noqa: E402 - Django is set up first
from millrace.gateway.endpoints.health import Healthz, Metrics, Readyz  # noqa: E402
from millrace.gateway.endpoints.inference import ChatCompletions, Completions, Unknown  # noqa: E402
from millrace.gateway.endpoints.models import Model, Models  # noqa: E402
from millrace.gateway.endpoints.resume import ResumeStream  # noqa: E402

application = ProtocolTypeRouter(
    {
        "http": URLRouter(
            [
                path("v1/chat/completions", ChatCompletions.as_asgi()),
                path("v1/completions", Completions.as_asgi()),
                path("v1/models", Models.as_asgi()),
                path("v1/models/<path:name>", Model.as_asgi()),
                path("v1/streams/<str:request_id>", ResumeStream.as_asgi()),
                path("healthz", Healthz.as_asgi()),
                path("readyz", Readyz.as_asgi()),
                path("metrics", Metrics.as_asgi()),
                re_path(r"^v1/", Unknown.as_asgi()),
                re_path("", django_application),
            ]
        ),
        "lifespan": lifespan,
    }
)
