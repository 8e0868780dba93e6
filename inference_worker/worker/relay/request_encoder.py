"""The HTTP requests that a relay sends, with the secret of their credential."""

from __future__ import annotations

from typing import Protocol

import msgspec
import structlog

from inference_worker.contract.upstream_presets import preset_of
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamRequest, UpstreamSpec
from inference_worker.contract.version import VERSION
from inference_worker.worker.engine_client import ActiveJob
from inference_worker.worker.relay.connections import Origin
from inference_worker.worker.relay.failures import UpstreamFailed

log = structlog.get_logger(__name__)

_PATHS = {"chat": "chat/completions", "completions": "completions", "embeddings": "embeddings", "messages": "messages"}


class UpstreamSecrets(Protocol):
    """The upstream credentials of a process, by their ids."""

    def secret(self, credential_id: int) -> str:
        """Return the secret.

        Raises:
            LookupError: the process does not have it.
        """

    def max_concurrency(self, credential_id: int) -> int | None:
        """Return the maximum number of concurrent requests of all replicas; None: no limit."""


class RequestEncoder:
    """The encoder of the requests to one upstream."""

    def __init__(self, upstream: UpstreamSpec, origin: Origin, secrets: UpstreamSecrets, api_key: str = "") -> None:
        """Create an encoder. `api_key`: of a managed server, which has no credential."""
        self._upstream = upstream
        self._origin = origin
        self._secrets = secrets
        self._api_key = api_key
        self._preset = preset_of(upstream)

    def credential(self, live: ActiveJob) -> int | None:
        """Return the id of an execution's credential. A managed engine has none."""
        if self._upstream.engine == UpstreamEngine.MANAGED:
            return None
        return live.job.credential if live.job.credential is not None else self._upstream.credential

    def encode(self, request: UpstreamRequest, live: ActiveJob) -> bytes:
        """Return the head and the body of a request.

        Raises:
            UpstreamFailed: the secret of its credential is missing.
        """
        content = self._body(request, live)
        return self._head(live, _PATHS[request.operation], len(content)) + content

    def redact(self, body: bytes, live: ActiveJob) -> bytes:
        """Return an error's body without the secret of the request, which some servers quote."""
        credential = self.credential(live)
        try:
            secret = self._api_key if credential is None else self._secrets.secret(credential)
        except LookupError:  # it was removed meanwhile
            return b""
        return body.replace(secret.encode(), b"***") if secret else body

    def _head(self, live: ActiveJob, path: str, length: int) -> bytes:
        """Return the head of a request.

        Raises:
            UpstreamFailed: the secret of its credential is missing.
        """
        preset = self._preset
        fields = {
            "host": self._origin.authority,
            "accept-encoding": "identity",
            "content-type": "application/json",
            "content-length": str(length),
            "user-agent": f"millrace/{VERSION}",
            **preset.headers,
        }
        if self._api_key:
            fields["authorization"] = f"Bearer {self._api_key}"
        if (credential := self.credential(live)) is not None:
            try:
                fields[preset.auth_header] = preset.auth_prefix + self._secrets.secret(credential)
            except LookupError as exc:
                log.warning("credential_missing", credential=credential, error=type(exc).__name__)
                message = "The credential of the model's provider is not available yet. Retry later."
                raise UpstreamFailed("server_is_overloaded", message, retry_after=2.0, is_capacity=True) from None
        if any(char in value for value in fields.values() for char in "\r\n"):
            raise UpstreamFailed("upstream_error", "The credential of the model's provider is not valid.")
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST {self._origin.path}/{path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")

    def _body(self, request: UpstreamRequest, live: ActiveJob) -> bytes:
        """Return the body with the fields that depend on the deployment and on the admission."""
        fields: dict[str, object] = {"model": self._upstream.model}
        if request.operation != "embeddings":
            fields |= {"stream": True, self._preset.max_tokens: live.job.params.max_tokens}
            if "include_usage" in self._preset.parameters:
                fields["stream_options"] = {"include_usage": True}
        return request.body[:-1] + (b"," if len(request.body) > 2 else b"") + msgspec.json.encode(fields)[1:]
