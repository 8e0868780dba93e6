"""/healthz: the process lives. /readyz: it can serve. /metrics: for Prometheus."""

from __future__ import annotations

from millrace.gateway.http import HttpConsumer


class Healthz(HttpConsumer):
    endpoint = "healthz"
    method = "GET"
    logged = False

    async def handle(self, body: bytes) -> None:
        await self.respond_json(200, {"status": "ok"})


class Readyz(HttpConsumer):
    endpoint = "readyz"
    method = "GET"
    logged = False

    async def handle(self, body: bytes) -> None:
        checks = await self.gateway.readiness()
        ready = all(state == "ok" for state in checks.values())
        await self.respond_json(200 if ready else 503, {"status": "ready" if ready else "not ready", "checks": checks})


class Metrics(HttpConsumer):
    endpoint = "metrics"
    method = "GET"
    logged = False

    async def handle(self, body: bytes) -> None:
        await self.gateway.read_settler_status()
        await self.respond(200, self.gateway.metrics.render(), b"text/plain; version=0.0.4; charset=utf-8")
