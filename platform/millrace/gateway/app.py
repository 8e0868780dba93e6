"""The gateway process: what its endpoints share, from start to stop."""

from __future__ import annotations

import asyncio
import gc
import secrets
from collections.abc import Mapping
from typing import Any

import psycopg
import redis.asyncio as redis
import structlog
from psycopg_pool import AsyncConnectionPool, PoolTimeout
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from billing.budgets.budget_leases import BudgetLeaseStore
from billing.metering import status
from millrace.apps.batches.storage import Storage
from millrace.conf.environment import PlatformSettings, platform_settings
from millrace.gateway.admission.admission import RateLimitAdmission
from millrace.gateway.admission.budget_admission import BudgetAdmission, RequestAdmission
from millrace.gateway.admission.disk import DiskWatch
from millrace.gateway.admission.idempotency import IdempotencyStore
from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.auth.authentication import KeyStore
from millrace.gateway.auth.revocation import ChangeFeedReader
from millrace.gateway.core.body_memory import BodyMemory
from millrace.gateway.core.catalog import ServedModel, load_catalog
from millrace.gateway.core.malloc import return_freed_memory
from millrace.gateway.core.request_db import TenantConnectionPool
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.jobs import InferenceJobBuilder
from millrace.gateway.dispatch.metrics import GatewayMetrics
from millrace.gateway.dispatch.monitor import DispatchMonitor
from millrace.gateway.dispatch.replicas import read_present
from millrace.gateway.dispatch.stream_subscribers import StreamSubscribers
from millrace.gateway.lifecycle.batch_lines import BatchLineStore
from millrace.gateway.lifecycle.batch_runner import BatchRunner
from millrace.gateway.lifecycle.request_log import RequestLogWriter
from millrace.gateway.lifecycle.service import InferenceService
from millrace.gateway.prompt_processes.prompt_pool import PromptPool
from millrace.gateway.prompt_processes.prompt_reader import PromptReader
from millrace.gateway.routing.router import Router
from tenants.isolation import db_roles

log = structlog.get_logger(__name__)

CONNECTIONS = 256
BROKER_SECONDS = 0.4  # for one answer of the broker: a request needs two at most, and is answered within a second
CHECK_SECONDS = 1.0  # a dependency that does not answer within this is not ready


class Gateway:
    """One per process. Made and started by the ASGI server's lifespan."""

    def __init__(self, settings: PlatformSettings, models: Mapping[str, ServedModel]) -> None:
        self.settings = settings
        self.id = f"gw-{secrets.token_hex(6)}"
        self.broker = _connect(settings.valkey_url)
        self.patient_broker = _connect(settings.valkey_url, patient=True)
        self.database = AsyncConnectionPool(
            db_roles.as_role(settings.database_url, db_roles.SYSTEM),  # whose a key is, is what is asked
            min_size=1,
            max_size=4,
            open=False,
            kwargs={"autocommit": True},
        )
        self.keys = KeyStore(self.broker, self.database, settings.key_peppers)
        self.live = ActiveRequests()
        slices = BudgetLeaseStore(self.database, self.id, settings.request_timeout_seconds)
        self.budget_admission = BudgetAdmission(slices, self.broker, self.patient_broker)
        self.changes = ChangeFeedReader(
            self.database, self.patient_broker, self.keys, self.live, self.budget_admission, gateway_id=self.id
        )
        self.router = Router(models)
        self.dispatcher = Dispatcher(
            self.broker,
            self.patient_broker,
            self.id,
            queue_seconds=settings.queue_timeout_seconds,
            keep_seconds=settings.stream_retention_seconds,
        )
        self.watch = DispatchMonitor(self.dispatcher)
        self.readers = StreamSubscribers(self.broker)
        self.rows = TenantConnectionPool(settings.database_url)
        self.storage = Storage(settings.data_dir)
        self.idempotency = IdempotencyStore(self.broker)
        limits = RateLimitAdmission(self.broker, cached_token_limit_percent=settings.cached_token_limit_percent)
        self.admission = RequestAdmission(limits, self.budget_admission)
        self.metrics = GatewayMetrics(self.dispatcher.replicas)
        self.disk = DiskWatch(settings)
        self.service = InferenceService(
            self.router,
            self.admission,
            self.dispatcher,
            self.metrics,
            self.live,
            self.readers,
            InferenceJobBuilder(self.id, settings.prefix_cache_secret, settings.request_timeout_seconds),
            self.disk,
        )
        self.body_memory = BodyMemory()
        self.prompt_pool = PromptPool(models, settings.prompt_processes)
        self.prompts = PromptReader(self.router, self.admission, self.prompt_pool, settings.max_request_body_bytes)
        self.recorder = RequestLogWriter(self.rows, self.id, self.metrics)
        lines = BatchLineStore(self.rows, self.id)
        self.batches = BatchRunner(
            lines,
            self.storage,
            self.keys,
            self.live,
            self.dispatcher,
            self.service,
            self.recorder,
            self.prompts,
            self.body_memory,
        )

    async def start(self) -> None:
        # Not waiting: a database that comes up later is found later, and /readyz says so until then.
        await self.database.open(wait=False)
        await self.disk.start()
        await self.rows.open()
        await self.changes.start()
        await self.dispatcher.start()
        await self.watch.start()
        await self.admission.start()
        await self.idempotency.start()
        await self.recorder.start()
        await self.prompt_pool.start()
        await self.batches.start()
        log.info("gateway_started", gateway_id=self.id, models=[spec.name for spec in self.settings.models])

    async def stop(self) -> None:
        await self.disk.stop()
        await self.batches.stop()
        await self.service.drain()
        await self.prompt_pool.stop()
        await self.idempotency.stop()
        await self.changes.stop()
        await self.admission.stop()
        await self.watch.stop()
        await self.dispatcher.stop()
        await self.recorder.stop()
        await self.rows.close()
        await self.database.close()
        await self.broker.aclose()
        await self.patient_broker.aclose()

    async def readiness(self) -> dict[str, str]:
        """Each thing this gateway needs, and `ok` or what is wrong with it."""
        database, present = await asyncio.gather(self._check_database(), self._read_replicas())
        valkey = "unreachable" if present is None else "ok"
        checks = {"postgres": database, "valkey": valkey, "disk": self.disk.check()}
        for spec in self.settings.models:
            ready = set(self.dispatcher.replicas.ready(spec.name))
            if present is not None:  # an exit that the watch has not seen yet
                ready &= present
            checks[f"model {spec.name}"] = "ok" if ready else "no replica is ready"
        return checks

    async def read_settler_status(self) -> None:
        """Fetch what /metrics tells of the settler."""
        try:
            payload: Any = await self.broker.get(status.STATUS_KEY)
        except redis.RedisError:
            return
        if payload is not None:
            self.metrics.settler.status = status.decode(payload)

    async def _check_database(self) -> str:
        try:
            async with asyncio.timeout(CHECK_SECONDS), self.database.connection(timeout=CHECK_SECONDS) as connection:
                await connection.execute("SELECT 1")
        except (psycopg.Error, PoolTimeout, TimeoutError):
            return "unreachable"
        return "ok"

    async def _read_replicas(self) -> set[str] | None:
        """Return the replicas that the broker has now; None if the broker is unreachable."""
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                return await read_present(self.broker)
        except (redis.RedisError, OSError, TimeoutError):
            return None


def _connect(url: str, *, patient: bool = False) -> redis.Redis:
    """Return a client for the whole process. When all connections are busy callers wait for one, for a moment.

    On a request's way nothing is tried twice and nothing waited for: a broker that does not answer is told to the
    caller within a second. A patient client is for those that block on the broker, and try again by themselves.
    """
    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=CONNECTIONS,
        timeout=5 if patient else BROKER_SECONDS / 2,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=5 if patient else BROKER_SECONDS,
        socket_connect_timeout=BROKER_SECONDS,
        health_check_interval=10 if patient else 0,
    )
    return redis.Redis.from_pool(pool)


_running: list[Gateway] = []


def running_gateway() -> Gateway:
    """Return this process' gateway, between the lifespan's start and stop."""
    return _running[0]


async def lifespan(scope: Any, receive: Any, send: Any) -> None:
    """ASGI lifespan: start the gateway before the first request, stop it after the last."""
    await receive()
    return_freed_memory()
    try:
        settings = platform_settings()
        gateway = Gateway(settings, load_catalog(settings.models, settings.data_dir))
        await gateway.start()
    except Exception as exc:
        log.exception("gateway_start_failed")
        await send({"type": "lifespan.startup.failed", "message": str(exc)})
        return
    _running.append(gateway)
    # What was imported and loaded stays for ever: a full collection that went through it would stop all streams for
    # 100 to 200 ms.
    gc.collect()
    gc.freeze()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    _running.remove(gateway)
    await gateway.stop()
    await send({"type": "lifespan.shutdown.complete"})
