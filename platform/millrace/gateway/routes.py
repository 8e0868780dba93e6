"""URL routes of the gateway: the HTTP consumer for each path, and the WebSocket endpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from django.urls import path, re_path
from django.urls.resolvers import RoutePattern

from millrace.gateway.http.consumer import METHODS, HttpConsumer
from millrace.gateway.http.endpoints.batches import BatchEndpoint, BatchesEndpoint, CancelBatch, CreateBatch
from millrace.gateway.http.endpoints.decisions import DecisionsEndpoint
from millrace.gateway.http.endpoints.feedback import SubmitFeedback
from millrace.gateway.http.endpoints.files import CreateFile, DeleteFile, FileContent, FileEndpoint, FilesEndpoint
from millrace.gateway.http.endpoints.health import Healthz, MetricsEndpoint, Readyz
from millrace.gateway.http.endpoints.inference import ChatCompletions, Completions, Embeddings, Rerank, Score, Unknown
from millrace.gateway.http.endpoints.message_batches import (
    CancelMessageBatch,
    CreateMessageBatch,
    DeleteMessageBatch,
    MessageBatch,
    MessageBatches,
    MessageBatchResults,
)
from millrace.gateway.http.endpoints.messages import CountTokens, Messages
from millrace.gateway.http.endpoints.models import ModelEndpoint, ModelsEndpoint
from millrace.gateway.http.endpoints.responses import CreateResponse, ResumeResponse
from millrace.gateway.http.endpoints.resume import ResumeStream
from millrace.gateway.http.endpoints.tokenization import Detokenize, Tokenize, TokenizerInfo
from millrace.gateway.http.endpoints.websocket import realtime_chat, refuse_socket


def _application(consumer: type[HttpConsumer]) -> Callable[..., Any]:
    return consumer.as_asgi()


def _by_method(*consumers: type[HttpConsumer]) -> Callable[..., Any]:
    """Return an application that selects the consumer by method. The first consumer rejects other methods."""
    applications = {method: _application(consumer) for consumer in consumers for method in consumer.methods()}
    first = applications[consumers[0].method]

    async def application(scope: Any, receive: Any, send: Any) -> None:
        scope = {**scope, METHODS: tuple(applications)}
        await applications.get(scope["method"], first)(scope, receive, send)

    application.consumers = consumers  # type: ignore[attr-defined]
    return application


def documented_consumers() -> Iterator[tuple[str, type[HttpConsumer]]]:
    """Yield each path of the API with its consumer, as docs/openapi.yaml lists them."""
    for route in ROUTES:
        pattern, callback = str(route.pattern), route.callback
        if isinstance(route.pattern, RoutePattern) and pattern.startswith("v1/"):
            for consumer in getattr(callback, "consumers", None) or (callback.consumer_class,):
                yield f"/{pattern}", consumer


# Channels routes to ASGI applications, where Django's `path` is typed for views.
ROUTES: list[Any] = [
    path("v1/chat/completions", _application(ChatCompletions)),
    path("v1/completions", _application(Completions)),
    path("v1/embeddings", _application(Embeddings)),
    path("v1/rerank", _application(Rerank)),
    path("v1/score", _application(Score)),
    path("v1/files", _by_method(CreateFile, FilesEndpoint)),
    path("v1/files/<str:file_id>", _by_method(FileEndpoint, DeleteFile)),
    path("v1/files/<str:file_id>/content", _application(FileContent)),
    path("v1/batches", _by_method(CreateBatch, BatchesEndpoint)),
    path("v1/batches/<str:batch_id>", _application(BatchEndpoint)),
    path("v1/batches/<str:batch_id>/cancel", _application(CancelBatch)),
    path("v1/responses", _application(CreateResponse)),
    path("v1/responses/<str:response_id>", _application(ResumeResponse)),
    path("v1/messages", _application(Messages)),
    path("v1/messages/count_tokens", _application(CountTokens)),
    path("v1/messages/batches", _by_method(CreateMessageBatch, MessageBatches)),
    path("v1/messages/batches/<str:batch_id>", _by_method(MessageBatch, DeleteMessageBatch)),
    path("v1/messages/batches/<str:batch_id>/cancel", _application(CancelMessageBatch)),
    path("v1/messages/batches/<str:batch_id>/results", _application(MessageBatchResults)),
    path("v1/models", _application(ModelsEndpoint)),
    path("v1/models/<path:name>", _application(ModelEndpoint)),
    path("v1/streams/<str:request_id>", _application(ResumeStream)),
    path("v1/requests/<str:request_id>/decisions", _application(DecisionsEndpoint)),
    path("v1/requests/<str:request_id>/feedback", _application(SubmitFeedback)),
    path("tokenize", _application(Tokenize)),  # this and the next two as in vLLM
    path("detokenize", _application(Detokenize)),
    path("tokenizer_info", _application(TokenizerInfo)),
    path("healthz", _application(Healthz)),
    path("health", _application(Healthz)),  # the same path as in vLLM
    path("readyz", _application(Readyz)),
    path("metrics", _application(MetricsEndpoint)),
    re_path(r"^v1/", _application(Unknown)),
]
_chat: Callable[..., Any] = realtime_chat
_rejected: Callable[..., Any] = refuse_socket
SOCKETS: list[Any] = [path("v1/realtime/chat", _chat), re_path("", _rejected)]
