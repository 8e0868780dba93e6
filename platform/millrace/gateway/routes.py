"""Which consumer answers which path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.urls import path, re_path

from millrace.gateway.endpoints.health import Healthz, Metrics, Readyz
from millrace.gateway.endpoints.inference import ChatCompletions, Completions, Embeddings, Unknown
from millrace.gateway.endpoints.models import Model, Models
from millrace.gateway.endpoints.resume import ResumeStream
from millrace.gateway.endpoints.why import Why
from millrace.gateway.http import HttpConsumer


def _application(consumer: type[HttpConsumer]) -> Callable[..., Any]:
    return consumer.as_asgi()


# Channels routes to ASGI applications, where Django's `path` is typed for views.
ROUTES: list[Any] = [
    path("v1/chat/completions", _application(ChatCompletions)),
    path("v1/completions", _application(Completions)),
    path("v1/embeddings", _application(Embeddings)),
    path("v1/models", _application(Models)),
    path("v1/models/<path:name>", _application(Model)),
    path("v1/streams/<str:request_id>", _application(ResumeStream)),
    path("v1/requests/<str:request_id>/why", _application(Why)),
    path("healthz", _application(Healthz)),
    path("readyz", _application(Readyz)),
    path("metrics", _application(Metrics)),
    re_path(r"^v1/", _application(Unknown)),
]
