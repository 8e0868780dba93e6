"""/healthz: the process runs. /readyz: it can accept requests. /metrics: metrics for Prometheus."""

from __future__ import annotations

import secrets

from millrace.environment.processes import read_processes
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.http.consumer import HttpConsumer
from millrace.gateway.http.queries import read_query
from tenants.keys.ip_allowlist import is_allowed

ALL_MODELS = "all"
LOOPBACK = ("127.0.0.0/8", "::1/128")


class Healthz(HttpConsumer):
    endpoint = "healthz"
    method = "GET"
    logged = False

    async def handle(self) -> None:
        await self.respond_json(200, {"status": "ok"})


class Readyz(HttpConsumer):
    """Whether this gateway's own needs are met; with `models=all`, also whether each model has a replica."""

    endpoint = "readyz"
    method = "GET"
    logged = False
    query_names = ("models",)

    async def handle(self) -> None:
        models = read_query(self.scope, self.query_names).get("models")
        if models not in (None, ALL_MODELS):
            raise invalid("models", f"models must be {ALL_MODELS}.")
        readiness = await self.gateway.readiness()
        ready = readiness.is_ready(with_models=models == ALL_MODELS)
        # A process that is down does not make this gateway unready: `checks` covers what requests need.
        processes = read_processes(self.gateway.settings.data_dir)
        not_running = {process.name: str(process.describe()) for process in processes if not process.running}
        response = {"status": "ready" if ready else "not ready", "checks": readiness.checks, "down": not_running}
        await self.respond_json(200 if ready else 503, response)


class MetricsEndpoint(HttpConsumer):
    endpoint = "metrics"
    method = "GET"
    logged = False

    async def handle(self) -> None:
        self._require_reader()
        await self.gateway.read_metrics()
        await self.respond(200, await self.gateway.metrics.render(), b"text/plain; version=0.0.4; charset=utf-8")

    def _require_reader(self) -> None:
        """Check that the client may read metrics of all tenants: it has the token, or is local if there is none.

        Raises:
            ApiError: 401, the token is wrong; 403, there is no token and the client is not local.
        """
        if token := self.gateway.settings.metrics_token:
            sent = self.headers.get(b"authorization", b"")
            if not secrets.compare_digest(sent, b"Bearer " + token.encode()):
                raise ApiError("invalid_api_key", "Send the metrics token as `Authorization: Bearer <token>`.")
        elif not is_allowed((self.scope["client"] or ("",))[0], LOOPBACK):
            raise ApiError(
                "insufficient_scope", "Metrics are available only from localhost or with MILLRACE_METRICS_TOKEN."
            )
