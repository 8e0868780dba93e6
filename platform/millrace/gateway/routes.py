"""Which consumer answers which path."""

from __future__ import annotations

from django.urls import path, re_path

from millrace.gateway.endpoints.health import Healthz, Metrics, Readyz
from millrace.gateway.endpoints.inference import ChatCompletions, Completions, Unknown
from millrace.gateway.endpoints.models import Model, Models
from millrace.gateway.endpoints.resume import ResumeStream

ROUTES = [
    path("v1/chat/completions", ChatCompletions.as_asgi()),
    path("v1/completions", Completions.as_asgi()),
    path("v1/models", Models.as_asgi()),
    path("v1/models/<path:name>", Model.as_asgi()),
    path("v1/streams/<str:request_id>", ResumeStream.as_asgi()),
    path("healthz", Healthz.as_asgi()),
    path("readyz", Readyz.as_asgi()),
    path("metrics", Metrics.as_asgi()),
    re_path(r"^v1/", Unknown.as_asgi()),
]
