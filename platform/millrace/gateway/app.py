"""The gateway process: builds, starts and stops the objects that all of its requests share.

The ASGI server calls `lifespan`, which creates the `Gateway`. Endpoints reach it with `running_gateway`. The docstring
of millrace.gateway describes the path of a request through these objects.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
import sys
from typing import Any

import psycopg
import redis.asyncio as redis
import structlog
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from billing.costs.spend import SpendStore
from billing.metering import status
from billing.reservations.budget_leases import BudgetLeaseStore
from inference_worker.contract import valkey
from inference_worker.contract.deployments import WantedState
from inference_worker.contract.process_memory import release_code, return_freed_memory, trim_heap
from millrace.apps.batches.storage import Storage
from millrace.environment.configuration import PlatformSettings, platform_settings
from millrace.gateway.admission.budget_admission import BudgetAdmission, RequestAdmission
from millrace.gateway.admission.budget_shares import BudgetShares
from millrace.gateway.admission.disk import DiskWatch
from millrace.gateway.admission.idempotency import IdempotencyStore
from millrace.gateway.admission.spend_limits import SpendLimits
from millrace.gateway.answer_cache.answer_cache import AnswerCache
from millrace.gateway.answer_cache.answer_store import AnswerStore
from millrace.gateway.answer_cache.embedder import QuestionEmbedder
from millrace.gateway.answer_cache.semantic_cache import SemanticCache
from millrace.gateway.answer_cache.semantic_store import SemanticStore
from millrace.gateway.answer_cache.side_executions import SideExecutions
from millrace.gateway.assembly import ServiceParts, make_service
from millrace.gateway.auth.active_requests import ActiveRequests
from millrace.gateway.auth.authentication import KeyStore
from millrace.gateway.auth.callers import CallerStore
from millrace.gateway.auth.revocation import ChangeFeedReader
from millrace.gateway.auth.stale_window import StaleWindow, answer_within
from millrace.gateway.core.activity import Activity
from millrace.gateway.core.asyncio_utils import run_for
from millrace.gateway.core.body_memory import BodyMemory
from millrace.gateway.core.bundle_store import BundleStore
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.cors import CrossOrigin
from millrace.gateway.core.readiness import OK, STALE, Readiness
from millrace.gateway.core.request_db import TenantConnectionPool
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.jobs import InferenceJobBuilder
from millrace.gateway.dispatch.metrics import GatewayMetrics
from millrace.gateway.dispatch.monitor import DispatchMonitor
from millrace.gateway.dispatch.replica_metrics import read_snapshots
from millrace.gateway.dispatch.replicas import read_present
from millrace.gateway.dispatch.stream_subscribers import StreamSubscribers
from millrace.gateway.lifecycle.batch_lines import BatchLineStore
from millrace.gateway.lifecycle.batch_runner import BatchRunner
from millrace.gateway.lifecycle.catalog_updates import CatalogUpdater, read_catalog
from millrace.gateway.lifecycle.request_log import RequestLogWriter
from millrace.gateway.lifecycle.service import InferenceService
from millrace.gateway.prompt_processes.prompt_pool import PromptPool
from millrace.gateway.prompt_processes.prompt_reader import PromptReader
from millrace.gateway.routing.router import Router
from millrace.gateway.routing.signals import LatencyTracker, TargetSignals
from tenants.isolation import db_roles
from tenants.outbox.totals import TOTALS_KEY, read_totals

log = structlog.get_logger(__name__)

STOP_SECONDS = 8.0  # for each part of the gateway; `millrace up` kills the process 10 s after its requests had to end
CHECK_SECONDS = 1.0  # a dependency that takes longer is not ready
NOT_LOADED = "not loaded yet"
GC_THRESHOLD = (
    5000  # objects of a young collection: requests in progress are not garbage, and few objects are in cycles
)
# A thread of Django returns the interpreter to the event loop after this time; Python's default is ten times as long.
SWITCH_SECONDS = 0.0005


class Gateway:
    """The shared objects of one gateway process."""

    def __init__(self, settings: PlatformSettings, models: dict[str, ServedModel]) -> None:
        self.settings = settings
        self._models = models
        loading = {spec.name for spec in settings.models} - models.keys()  # their bundles are not read yet
        self.id = f"gw-{secrets.token_hex(6)}"
        self.broker = valkey.connect_async(settings.valkey_url, valkey.REQUEST_PATH)
        self.blocking_broker = valkey.connect_async(settings.valkey_url, valkey.GATEWAY_READS)
        self.database = _make_pool(settings, max_size=4)
        # Separate, so that lookups of keys and leases delay neither revocations nor /readyz.
        self.control_database = _make_pool(settings, max_size=2)
        self.active_requests = ActiveRequests()
        activity = self.activity = Activity(lambda: bool(self.dispatcher.in_flight or self.active_requests))
        self.stale_window = StaleWindow(settings.stale_key_seconds)
        self.keys = KeyStore(
            self.broker, self.database, settings.key_peppers, activity=activity, stale_window=self.stale_window
        )
        self.callers = CallerStore(settings.database_url, settings.key_peppers)
        self.cross_origin = CrossOrigin(settings.allowed_origins, self.database)
        leases = BudgetLeaseStore(self.database, self.id, settings.request_timeout_seconds)
        self.budget_admission = BudgetAdmission(leases, self.broker, self.blocking_broker, activity, self.stale_window)
        self.changes = ChangeFeedReader(
            self.control_database,
            self.blocking_broker,
            self.keys,
            self.active_requests,
            self.budget_admission,
            gateway_id=self.id,
            activity=activity,
        )
        self.dispatcher = Dispatcher(
            self.broker,
            self.blocking_broker,
            self.id,
            queue_seconds=settings.queue_timeout_seconds,
            retention_seconds=settings.stream_retention_seconds,
            locality_tokens=settings.locality_tokens,
        )
        latencies = LatencyTracker()
        signals = TargetSignals(self.budget_admission.prices, latencies, self.dispatcher.relative_load)
        self.router = Router(models, loading, signals)
        self.monitor = DispatchMonitor(
            self.dispatcher, activity, lambda: self.catalog.failures, lambda: self.disk.report
        )
        self.subscribers = StreamSubscribers(self.broker)
        self.tenant_db = TenantConnectionPool(settings.database_url)
        self.storage = Storage(settings.data_dir)
        self.idempotency = IdempotencyStore(self.broker)
        self.admission = RequestAdmission(
            self.broker,
            self.budget_admission,
            spend_limits=SpendLimits(SpendStore(self.database, settings.request_timeout_seconds), activity),
            commands=self.dispatcher.commands,  # what both send in one iteration of the event loop is one write
            cached_token_limit_percent=settings.cached_token_limit_percent,
        )
        self.metrics = GatewayMetrics(self.dispatcher.replicas)
        self.metrics.registry.register(self.dispatcher.placement.hit_rates)
        self.disk = DiskWatch(settings.data_dir, settings.min_free_disk, activity)
        self.request_log = RequestLogWriter(self.tenant_db, self.id, self.metrics)
        self.service = self._make_service(latencies)
        self.body_memory = BodyMemory()
        self.prompt_pool = PromptPool(models, settings.prompt_processes)
        self.catalog = CatalogUpdater(
            self.broker,
            models,
            loading,
            self.dispatcher.replicas,
            self.prompt_pool,
            _make_bundle_store(settings, self.broker),
            settings.models,
            activity,
        )
        self.prompts = PromptReader(
            self.router,
            self.admission,
            self.prompt_pool,
            settings.max_request_body_bytes,
            settings.unknown_parameters,
        )
        batch_lines = BatchLineStore(self.tenant_db, self.id)
        self.batches = BatchRunner(
            batch_lines,
            self.storage,
            self.keys,
            self.active_requests,
            self.dispatcher,
            self.service,
            self.request_log,
            self.prompts,
            self.body_memory,
            activity,
        )

    def _make_service(self, latencies: LatencyTracker) -> InferenceService:
        """Return the service that runs the requests."""
        settings = self.settings
        jobs = InferenceJobBuilder(self.id, settings.prefix_cache_secret, settings.request_timeout_seconds)
        store = AnswerStore(self.broker, settings.prefix_cache_secret, settings.request_timeout_seconds)
        side_executions = SideExecutions(self.admission, self.dispatcher, jobs)
        semantic = SemanticCache(
            SemanticStore(self.tenant_db, store.cipher),
            QuestionEmbedder(settings.semantic_cache_model, self.router, side_executions),
            settings.semantic_cache_wait_ms / 1000,
        )
        return make_service(
            ServiceParts(
                router=self.router,
                admission=self.admission,
                dispatcher=self.dispatcher,
                metrics=self.metrics,
                jobs=jobs,
                answers=AnswerCache(store, self.dispatcher, semantic),
                side_executions=side_executions,
                disk=self.disk,
                request_log=self.request_log,
                active_requests=self.active_requests,
                subscribers=self.subscribers,
                prices=self.budget_admission.prices,
                latencies=latencies,
                budget_shares=BudgetShares(self.database),
                checks_paid_by=settings.semantic_cache_checks_paid_by,
                shadows_paid_by=settings.shadows_paid_by,
            )
        )

    async def start(self) -> None:
        # Does not wait for the database. Until it is available, /readyz reports it as unreachable.
        await self.database.open(wait=False)
        await self.control_database.open(wait=False)
        await self.disk.start()
        await self.tenant_db.open()
        await self.callers.start()
        await self.changes.start()
        await self.dispatcher.start()
        await self.monitor.start()
        await self.admission.start()
        await self.idempotency.start()
        await self.request_log.start()
        await self.prompt_pool.start()
        await self.catalog.start()
        await self.batches.start()
        log.info("gateway_started", gateway_id=self.id, models=sorted(self._models))

    async def stop(self) -> None:
        """Stop all parts in order. A part that does not end within STOP_SECONDS, or fails, does not delay the others.

        Leases, slots and claims that it leaves expire.
        """
        for name, stop in (
            ("disk", self.disk.stop),
            ("batches", self.batches.stop),
            ("requests", self.service.drain),
            ("catalog", self.catalog.stop),
            ("prompt_pool", self.prompt_pool.stop),
            ("idempotency", self.idempotency.stop),
            ("changes", self.changes.stop),
            ("admission", self.admission.stop),
            ("monitor", self.monitor.stop),
            ("dispatcher", self.dispatcher.stop),
            ("request_log", self.request_log.stop),
            ("callers", self.callers.stop),
            ("tenant_db", self.tenant_db.close),
            ("control_database", self.control_database.close),
            ("database", self.database.close),
            ("broker", self.broker.aclose),
            ("blocking_broker", self.blocking_broker.aclose),
        ):
            try:
                if not await run_for(STOP_SECONDS, stop()):
                    log.error("gateway_part_left", part=name)
            except Exception:
                log.exception("gateway_stop_failed", part=name)

    async def readiness(self) -> Readiness:
        """Check what this gateway needs, and the models that it should serve."""
        database, present, _ = await asyncio.gather(
            self._check_database(), self._read_replicas(), self.activity.refresh()
        )
        own = {
            "postgres": database,
            "valkey": "unreachable" if present is None else OK,
            "disk": self.disk.check(),
            "prices": OK if self.admission.budgets.has_prices else NOT_LOADED,
            "catalog": OK if self.catalog.is_loaded else NOT_LOADED,
            "replicas": OK if self.monitor.knows_replicas else NOT_LOADED,
        }
        models = {f"model {name}": self._check_model(name, present) for name in self._required_models()}
        return Readiness(own, models)

    def _check_model(self, name: str, present: set[str] | None) -> str:
        """Return whether a replica takes requests for the model.

        Args:
            present: the replicas with a heartbeat in Valkey, without those whose exit the monitor has not seen yet;
                None if Valkey is unreachable.
        """
        model = self.router.find_served(name)
        key = name if model is None else model.key
        ready = {*self.dispatcher.replicas.find_ready(key), *self.dispatcher.replicas.find_loadable(key)}
        if present is not None:
            ready &= present
        return OK if ready else "no replica is ready"

    def _required_models(self) -> list[str]:
        """Return the models that a ready gateway serves: those of the settings, unless an operator has changed that."""
        names = [spec.name for spec in self.settings.models]
        if self.catalog.wanted is None:
            return names
        found = {each.spec.name: each for each in self.catalog.wanted.deployments}
        return [
            name
            for name in names
            if name in found and found[name].state == WantedState.LOADED and not found[name].idle_seconds
        ]

    async def read_metrics(self) -> None:
        """Read the metrics of replicas, settler and web jobs for /metrics, and let resting polls run."""
        await self.activity.refresh()
        try:
            payload: Any = await self.broker.get(status.STATUS_KEY)
            outbox_totals: Any = await self.broker.hgetall(TOTALS_KEY)
            snapshots = await read_snapshots(self.broker, list(self.dispatcher.replicas.live()))
        except redis.RedisError:
            self.metrics.replicas.update({})
            return
        self.metrics.replicas.update(snapshots)
        if payload is not None:
            self.metrics.settler.status = status.decode(payload)
        self.metrics.outboxes.totals = tuple(read_totals(outbox_totals))

    async def _check_database(self) -> str:
        """Return `stale` if PostgreSQL does not answer, and requests of cached keys are accepted nevertheless."""
        try:
            await answer_within(CHECK_SECONDS, self._query_database())
        except (psycopg.Error, PoolTimeout, TimeoutError):
            return STALE if self.stale_window.is_open else "unreachable"
        return OK

    async def _query_database(self) -> None:
        async with self.control_database.connection(timeout=CHECK_SECONDS) as connection:
            await connection.execute("SELECT 1")

    async def _read_replicas(self) -> set[str] | None:
        """Return the IDs of the replicas with a heartbeat in Valkey, or None if Valkey is unreachable."""
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                return await read_present(self.broker)
        except (redis.RedisError, OSError, TimeoutError):
            return None


def _make_pool(settings: PlatformSettings, max_size: int) -> AsyncConnectionPool:
    """Return a closed pool. Its role sees every tenant, since a key is looked up before its tenant is known."""
    return AsyncConnectionPool(
        db_roles.as_role(settings.database_url, db_roles.SYSTEM),
        min_size=1,
        max_size=max_size,
        open=False,
        kwargs={"autocommit": True},
    )


def _make_bundle_store(settings: PlatformSettings, broker: redis.Redis) -> BundleStore:
    return BundleStore(broker, settings.data_dir, settings.worker_secret)


_running: list[Gateway] = []


def running_gateway() -> Gateway:
    """Return the gateway of this process. It exists between the lifespan's startup and shutdown."""
    return _running[0]


async def lifespan(scope: Any, receive: Any, send: Any) -> None:
    """ASGI lifespan: start the gateway before the first request, stop it after the last."""
    await receive()
    return_freed_memory()
    try:
        settings = platform_settings()
        async with valkey.connect_async(settings.valkey_url, valkey.REQUEST_PATH) as broker:
            models = await read_catalog(broker, settings.models, _make_bundle_store(settings, broker))
        gateway = Gateway(settings, models)
        await gateway.start()
    except Exception as exc:
        log.exception("gateway_start_failed")
        await send({"type": "lifespan.startup.failed", "message": str(exc)})
        return
    _running.append(gateway)
    # Imported modules and loaded tokenizers are never freed. A full garbage collection that traverses them would pause
    # all streams for 100 to 200 ms.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
    sys.setswitchinterval(SWITCH_SECONDS)
    trim_heap()
    release_code()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    _running.remove(gateway)
    await gateway.stop()
    await send({"type": "lifespan.shutdown.complete"})
