"""The paths by which clients reach an endpoint: a trailing slash is ignored, and the paths of Azure,
Cohere and vLLM are those of /v1."""

from __future__ import annotations

import re
from typing import Any

DEPLOYMENT = "millrace.deployment"  # key in the scope: the model that an Azure path names
_AZURE = re.compile(
    r"/openai/(?:deployments/(?P<deployment>.+?)/(?P<path>chat/completions|completions|embeddings)|(?:v1/)?(?P<other>.+))/?"
)
_RERANK_PATHS = {  # paths of Cohere's second API and of vLLM
    "/v2/rerank": "/v1/rerank",
    "/rerank": "/v1/rerank",
    "/score": "/v1/score",
}
_API_VERSION = re.compile(rb"(?:^|&)api-version=[^&]*")


def with_client_paths(application: Any) -> Any:
    """Return the ASGI application behind a translation of the clients' paths."""

    async def translate_and_call(scope: Any, receive: Any, send: Any) -> None:
        await application(translate(scope), receive, send)

    return translate_and_call


def translate(scope: Any) -> Any:
    """Return the scope with the path of an endpoint below /v1, if its path names one in another form."""
    path = scope["path"]
    if (endpoint := _RERANK_PATHS.get(path.rstrip("/"))) is not None:
        return {**scope, "path": endpoint}
    if path.startswith("/openai/") and (match := _AZURE.fullmatch(path)):
        query = _API_VERSION.sub(b"", scope["query_string"]).lstrip(b"&")
        scope = {**scope, "path": f"/v1/{match['path'] or match['other']}", "query_string": query}
        if match["deployment"]:
            scope[DEPLOYMENT] = match["deployment"]
        path = scope["path"]
    if path.endswith("/") and (endpoint := path.rstrip("/")).startswith("/v1/"):
        scope = {**scope, "path": endpoint}
    return scope
