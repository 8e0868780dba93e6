"""A worker process: a resident engine, its connections to the broker, and its shutdown.

Celery's tasks are wakeups (app.py). They claim executions and submit them to the engine, but do not wait for the ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import redis
import structlog
import torch
from redis.exceptions import NoScriptError

from inference_worker.checkpoints.bundle_files import fingerprint_weights
from inference_worker.checkpoints.encoder_config import EncoderConfig, read_model_config
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.contract import claims, valkey
from inference_worker.contract.clocks import check_clock
from inference_worker.contract.command_connection import Command
from inference_worker.contract.compute_support import ComputeSupport, OptionRefused
from inference_worker.contract.cpu_placement import CpuPlacement
from inference_worker.contract.deployments import ALL_WORKERS, WANTED_KEY, WantedState, decode_wanted
from inference_worker.contract.disk import FreeSpace
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.exits import take_over
from inference_worker.contract.host import host_name
from inference_worker.contract.journal import RECORD_BYTES, Journal, JournalBusyError
from inference_worker.contract.messages import (
    TASK_LOST_MS,
    Claimed,
    Heartbeat,
    Machine,
    Wakeup,
    WorkerSupport,
    claim_key,
    decode_job,
    encode,
    wakeup_sent_key,
    wakeups_key,
    worker_of,
)
from inference_worker.contract.model_bundles import derive_salt
from inference_worker.contract.request import RequestError
from inference_worker.contract.settings import ModelSpec, WorkerSettings
from inference_worker.contract.unsettled_usage import UnsettledUsage, describe_unsettled
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from inference_worker.contract.version import VERSION
from inference_worker.contract.worker_names import default_name
from inference_worker.engine.compute_path import choose_path, find_support, place_engine
from inference_worker.engine.embeddings.embedding_engine import EmbeddingEngine
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.loading.loader import ProgressLog
from inference_worker.worker.bundle_publisher import BundlePublisher
from inference_worker.worker.control import Control
from inference_worker.worker.credentials import CredentialStore, needs_of
from inference_worker.worker.engine_client import ActiveJob, Engine, ResidentEngine
from inference_worker.worker.engine_options import make_engine_config
from inference_worker.worker.managed.engine import ManagedEngine, start_server
from inference_worker.worker.name_lease import NameLease, describe_conflict
from inference_worker.worker.orphaned_journals import OrphanedJournals
from inference_worker.worker.publisher import Publisher
from inference_worker.worker.reconciler import Reconciler
from inference_worker.worker.relay.relay import Relay, describe_upstream
from inference_worker.worker.replica import LoadedEngine, LocalReplica, ReplicaRecord
from inference_worker.worker.shared_pins import SharedPins
from inference_worker.worker.thread_commands import ThreadCommands
from inference_worker.worker.wakeups import decode_wakeups, wait_for_wakeup

log = structlog.get_logger(__name__)

CLAIM_AGAIN_SECONDS = 0.2
NO_MODEL = "none"  # as MILLRACE_WORKER_MODEL
MAX_REJECTIONS = 3  # after which a command with an error reply is not repeated
FIRST_RESTART_SECONDS = 1.0  # a managed server's pause; doubles with each failure within a minute of its start
MAX_RESTART_SECONDS = 120.0
CLOSING_SECONDS = 5.0  # for cancelled executions to end
MAX_WAKEUPS = 256  # taken from the list in one round trip
LOCK_WAIT_SECONDS = 5.0  # for the journal's lock, which another worker may have for a step (orphaned_journals.py)
TASK_SECONDS = 0.5  # how long a task serves further executions


def model_spec(settings: WorkerSettings) -> ModelSpec | None:
    """Return the model of MILLRACE_MODELS that this worker serves; None if it serves only its pools' deployments."""
    if settings.worker_model == NO_MODEL:
        return None
    by_name = {spec.name: spec for spec in settings.models}
    name = settings.worker_model or settings.models[0].name
    if name not in by_name:
        raise SystemExit(f"MILLRACE_WORKER_MODEL: {name!r} is not in MILLRACE_MODELS ({', '.join(by_name)})")
    return by_name[name]


def on_demand_specs(settings: WorkerSettings) -> list[ModelSpec]:
    """Return the models that this worker loads at their first request."""
    by_name = {spec.name: spec for spec in settings.models}
    home = model_spec(settings)
    for name in settings.worker_on_demand_models:
        if name not in by_name or by_name[name] == home:
            others = ", ".join(each for each, spec in by_name.items() if spec != home)
            raise SystemExit(f"MILLRACE_WORKER_ON_DEMAND_MODELS: {name!r} is not one of the other models ({others})")
    return [by_name[name] for name in settings.worker_on_demand_models]


def worker_name(settings: WorkerSettings) -> str:
    """Return the name of this worker.

    Raises:
        SystemExit: the worker has neither a name nor a model.
    """
    spec = model_spec(settings)
    if settings.worker_name:
        return settings.worker_name
    if spec is None:
        raise SystemExit(
            f"MILLRACE_WORKER_NAME: set a stable name that no other worker has, such as {socket.gethostname()}-0;"
            f" MILLRACE_WORKER_MODEL={NO_MODEL} has no default"
        )
    return default_name(spec.name, settings.data_dir)


def place_worker(settings: WorkerSettings) -> tuple[CpuPlacement, ComputeSupport]:
    """Return where the worker's engines compute on the CPU, and what they can compute with.

    Raises:
        SystemExit: the machine does not have the memory node or the instruction set of the settings.
    """
    try:
        claims = settings.data_dir / "memory-nodes"
        placement = place_engine(settings.device, settings.cpu_node, settings.cpu_threads, claims)
        with placement.bind():
            return placement, find_support(settings.device, settings.cpu_kernels, placement.threads)
    except ValueError as exc:
        raise SystemExit(str(exc)) from exc


def new_replica_id(settings: WorkerSettings) -> str:
    """Return the worker's name with a random suffix, so that a restarted worker is another replica."""
    return f"{worker_name(settings)}.{secrets.token_hex(4)}"


def describe_machine(config: EngineConfig) -> Machine:
    """Return the description of the device and dtype of an engine with this configuration.

    Raises:
        OptionRefused: this machine does not support an option.
    """
    model = read_model_config(config.model_dir)
    path, longest = choose_path(config, is_encoder=isinstance(model, EncoderConfig)), model.max_model_len
    return Machine(
        version=VERSION,
        device="cpu" if path.device.type == "cpu" else torch.cuda.get_device_name(path.device),
        cores=len(os.sched_getaffinity(0)),
        dtype=path.dtype_name,
        max_model_len=min(longest, config.max_model_len or longest),
        block_size=config.block_size,
        slow=path.slow,
    )


ENGINES: dict[str, Callable[[EngineConfig], Engine]] = {"embeddings": EmbeddingEngine, "generation": LLMEngine}


def engine_name(config: EngineConfig) -> str:
    """Return the name in `ENGINES` of the engine that runs the model."""
    return "embeddings" if isinstance(read_model_config(config.model_dir), EncoderConfig) else "generation"


def make_engine(config: EngineConfig) -> Engine:
    """Return the engine for the model directory."""
    return ENGINES[engine_name(config)](config)


class Worker:
    """All resident parts of a worker process."""

    def __init__(self, settings: WorkerSettings, replica_id: str) -> None:
        """Start a worker, and load the model that its settings name.

        Args:
            replica_id: of the process, and of its first replica.
        """
        self.settings = settings
        self.replica_id = replica_id
        self._broker = valkey.connect(settings.valkey_url, valkey.WORKER)
        self._placement, support = place_worker(settings)
        self._commands = ThreadCommands(self._broker)
        self._claim_script = str(self._broker.register_script(claims.CLAIM).sha)
        self._draining = threading.Event()
        self._drain_lock = threading.Lock()
        self._is_drained = False
        name = worker_name(settings)
        self.broken = threading.Event()
        self._name_lease = NameLease(self._broker, name, replica_id)
        journal_dir = settings.data_dir / "journal" / name
        journal = self._journal = self._open_journal(journal_dir, name)
        take_over(self._broker, journal_dir, replica_id)
        self._space = FreeSpace([settings.data_dir], settings.min_free_disk)
        self._space.look()
        self._publisher = Publisher(
            self._broker,
            journal,
            log_seconds=settings.request_timeout_seconds + settings.stream_retention_seconds,
            retention_seconds=settings.stream_retention_seconds,
            on_broken=lambda: os._exit(os.EX_SOFTWARE),  # the journal is on disk: the next process continues
        )
        self._orphaned_journals = OrphanedJournals(
            settings.valkey_url,
            journal_dir,
            settings.stream_retention_seconds,
            journal_retention_seconds=settings.journal_retention_seconds,
        )
        self.credentials = CredentialStore(
            self._broker,
            replica_id,
            settings.worker_secret,
            lambda: needs_of([replica.spec for replica in self.replicas.replicas]),
        )
        home, on_demand = self._home_replica(), on_demand_specs(settings)
        pools = (*settings.worker_pools, *self._home_pool(), *settings.worker_on_demand_models)
        self._pools = tuple(dict.fromkeys(pools))
        self.replicas = Reconciler(self._broker, name, replica_id, self._pools, self._load, home, on_demand)
        self._bundles = BundlePublisher(
            self._broker,
            settings.worker_secret,
            lambda: self.replicas.replicas,
            lambda spec: ensure_model(spec, settings.data_dir),
            on_demand,
        )
        if home is not None:
            try:
                self._load(home)  # an error ends the process
            except OptionRefused as exc:
                raise SystemExit(f"{home.spec.name} cannot be loaded: {exc}") from exc
        self._bundles.start()
        sent = WorkerSupport(self._pools, support, host_name(), int(time.time()))
        self._control = Control(
            self._broker,
            replica_id,
            self,
            self._heartbeats,
            sent,
            self._replica_records,
            self._unsettled_usage,
            journal.id,
        )
        self.credentials.start()
        self.replicas.start()
        self._orphaned_journals.start()

    def _open_journal(self, directory: Path, name: str) -> Journal:
        """Lock the journal, and take the lease of the worker's name.

        Raises:
            SystemExit: another running process has the name, or the clocks of this host and Valkey's differ.
        """
        try:
            check_clock(self._broker)
        except redis.RedisError as exc:
            log.warning("broker_unreachable", error=str(exc))
        try:
            journal = Journal(directory, LOCK_WAIT_SECONDS, retention_seconds=self.settings.journal_retention_seconds)
        except JournalBusyError as exc:
            raise SystemExit(
                f"{describe_conflict(name, self._name_lease.find_host())} ({directory} is locked)"
            ) from exc
        self._name_lease.take(journal.id, self.broken.set)
        return journal

    def run_task(self, wakeups: Sequence[Wakeup], replica_id: str = "") -> None:
        """Serve the executions of a task, and those that follow shortly, so that they need no tasks of their own.

        Meanwhile gateways add executions to the replica's list. If several replicas of the process serve, the task ends
        immediately, since the next task may be for another one. Called by one thread.

        Args:
            replica_id: the replica that the task is for; empty: the process's first one.
        """
        replica = self.replicas.find(replica_id or self.replica_id)
        until = time.monotonic() + TASK_SECONDS
        following: Sequence[Wakeup] = wakeups
        while following and replica is not None and self._may_wait(replica) and time.monotonic() < until:
            self._serve(replica, following, has_task=True)
            following = wait_for_wakeup(self._commands, replica.id)
        self.serve(following, replica_id)

    def serve(self, wakeups: Sequence[Wakeup], replica_id: str = "") -> list[ActiveJob]:
        """Claim these executions, and those that gateways have sent since, and submit them to the engine.

        Further executions need another task. Called by one thread.

        Args:
            replica_id: the replica that they were sent to; empty: the process's first one.

        Returns:
            The submitted executions.
        """
        replica = self.replicas.find(replica_id or self.replica_id)
        if replica is None:  # it was removed, and gateways send its executions to another one
            return []
        return self._serve(replica, wakeups, has_task=False)

    def live(self) -> list[ActiveJob]:
        """Return the executions of all replicas that have not ended."""
        return [live for replica in self.replicas.replicas for live in replica.live()]

    def cancel(self, live: ActiveJob, failure: RequestError | None = None) -> None:
        """End the execution, as `EngineClient.cancel`."""
        if (replica := self.replicas.find(live.replica_id)) is not None:
            replica.cancel(live, failure)

    def requeue(self, live: ActiveJob) -> None:
        """Return the execution to the queue, as `EngineClient.requeue`."""
        if (replica := self.replicas.find(live.replica_id)) is not None:
            replica.requeue(live)

    def _may_wait(self, replica: LocalReplica) -> bool:
        """Return whether a task may wait for further executions of the replica."""
        serving = [other for other in self.replicas.replicas if other.is_serving]
        return serving == [replica] and not self._draining.is_set() and self._room() > 0

    def _serve(self, replica: LocalReplica, wakeups: Sequence[Wakeup], *, has_task: bool) -> list[ActiveJob]:
        """Claim and submit executions. `has_task`: the current task also serves those that are sent from now on."""
        with replica.lock:
            submitted = self._claim_all(replica, wakeups, has_task=has_task)
        if submitted:
            replica.used_at = time.monotonic()
        time.sleep(0)  # let the engine's thread have the interpreter's lock before Celery finishes the task
        return submitted

    def _claim_all(self, replica: LocalReplica, wakeups: Sequence[Wakeup], *, has_task: bool) -> list[ActiveJob]:
        submitted: list[ActiveJob] = []
        names, count, is_first = list(wakeups), MAX_WAKEUPS, True
        while is_first or names:
            # Without room, gateways see that in the heartbeat.
            room = self._room() if replica.is_serving and not self._draining.is_set() else 0
            names = names[:room]
            count = min(count, room - len(names))
            claimed, received = self._claim(replica, names, count, is_first=is_first, has_task=has_task)
            for claim in claimed:
                try:
                    submitted.append(self._submit(replica, *claim))
                except Exception:  # the other executions are claimed too
                    log.exception("submission_failed")
            # The flag is changed only once, so what is sent after that has a later task. Otherwise this loop might not
            # end, and tasks would wait for it.
            count = MAX_WAKEUPS if len(received) == count == MAX_WAKEUPS else 0
            names, is_first = received, False
        return submitted

    def drain(self) -> None:
        """Claim nothing more, requeue executions without tokens, and let the others run until the shutdown timeout.

        A concurrent call returns when the first one has ended. So `close` never ends executions that still have time.
        """
        self._draining.set()
        with self._drain_lock:
            if self._is_drained:
                return
            self._name_lease.leave()
            for live in self.live():
                self.requeue(live)
            self.replicas.close()
            deadline = time.monotonic() + self.settings.shutdown_timeout_seconds
            while self.live() and time.monotonic() < deadline:
                time.sleep(0.05)
            for live in self.live():
                self.cancel(
                    live, RequestError("server_is_overloaded", "the worker was stopped before the answer was complete")
                )
            self._is_drained = True

    def close(self) -> None:
        """Stop permanently; call after `drain`. Executions that do not end within CLOSING_SECONDS are left.

        Gateways then end or repeat them, as those of a lost worker.
        """
        give_up_at = time.monotonic() + CLOSING_SECONDS
        while self.live() and not self.broken.is_set() and time.monotonic() < give_up_at:
            time.sleep(0.02)
        for live in self.live():
            log.error("execution_left", **live.job.billing_context.log_fields(), attempt=live.attempt)
        for replica in self.replicas.replicas:
            if replica.loaded is not None:
                replica.loaded.client.close()
        self._publisher.close()
        self._bundles.close()
        self._orphaned_journals.close()
        self._commands.close()
        self.credentials.close()
        self._control.close()
        self._name_lease.release()

    def _submit(self, replica: LocalReplica, attempt: int, payload: bytes, num_pins: int) -> ActiveJob:
        """Submit a claimed job to the replica's engine."""
        loaded = replica.loaded
        if loaded is None:
            raise AssertionError("the replica's lock is held, so its engine cannot be closed")
        job = decode_job(payload)
        job = msgspec.structs.replace(job, cache_salt=derive_salt(job.cache_salt, loaded.machine.variant))
        live = ActiveJob(job, attempt, replica.id, loaded.machine.block_size)
        if num_pins and loaded.pins is not None:
            live.paid = loaded.pins.look_up(live.job)
        loaded.client.submit(live)
        if self._control.was_cancelled(live):  # before it was submitted
            loaded.client.cancel(live)
        log.info("execution_claimed", **live.job.billing_context.log_fields(), attempt=attempt)
        return live

    def _room(self) -> int:
        """Return how many more executions the journal has space for; 0 if the disk is almost full."""
        if self._space.is_low:
            return 0
        return max(0, self._journal.room // RECORD_BYTES - len(self.live()))

    def _claim(
        self, replica: LocalReplica, wakeups: Sequence[Wakeup], count: int, *, is_first: bool, has_task: bool
    ) -> tuple[list[tuple[int, bytes, int]], list[Wakeup]]:
        """Claim executions, and take up to `count` wakeups from the replica's list, in one round trip.

        Wakeups in a lost response are lost, and gateways send them again.

        Returns:
            The attempt, the job and the number of pins of each claimed execution, and the next wakeups.
        """
        call = secrets.token_hex(8)
        commands: dict[str | Wakeup, Command] = {}
        if is_first and has_task:
            commands["flag"] = "SET", wakeup_sent_key(replica.id), "", "PX", TASK_LOST_MS
        elif is_first:
            commands["flag"] = "DEL", wakeup_sent_key(replica.id)  # from now on gateways send another task
        if count:
            commands["list"] = "LPOP", wakeups_key(replica.id), count
        for wakeup in wakeups:
            request_id, execution, attempt = wakeup
            event = encode([Claimed(request_id, attempt, replica.id)])
            key = claim_key(request_id, execution)
            commands[wakeup] = "EVALSHA", self._claim_script, 1, key, attempt, replica.id, call, event
        replies = self._execute(commands)
        claimed = [(name[2], *reply) for name, reply in replies.items() if isinstance(name, tuple) and reply]
        return claimed, decode_wakeups(replies.get("list") or [])

    def _execute(self, commands: Mapping[str | Wakeup, Command]) -> dict[str | Wakeup, Any]:
        """Execute the commands, and return the replies of those that succeed.

        Repeats the others until the broker answers. Otherwise a claim with a lost response would never run. A command
        that the broker rejects is repeated only a few times, so that it does not delay other executions.
        """
        replies: dict[str | Wakeup, Any] = {}
        deadline = time.monotonic() + self.settings.request_timeout_seconds
        rejections = 0
        while commands:
            try:
                answers = dict(zip(commands, self._commands.exchange(list(commands.values())), strict=True))
                errors = {name: reply for name, reply in answers.items() if isinstance(reply, redis.RedisError)}
                replies.update((name, reply) for name, reply in answers.items() if name not in errors)
                commands = {name: commands[name] for name in errors}
                if any(isinstance(error, NoScriptError) for error in errors.values()):
                    self._broker.script_load(claims.CLAIM)  # the first claim since the broker's start
                    continue
            except redis.RedisError as exc:
                log.warning("broker_unreachable", error=str(exc))
                has_failed = time.monotonic() > deadline
            else:
                for name, error in errors.items():
                    log.warning("broker_command_failed", command=name, error=str(error))
                rejections += 1
                has_failed = rejections == MAX_REJECTIONS
            if not commands or has_failed or self._draining.is_set():
                break
            time.sleep(CLAIM_AGAIN_SECONDS)
        return replies

    def _home_replica(self) -> LocalReplica | None:
        """Return the replica of the model that the settings name; None if the wanted deployments include the model.

        If they include it as the settings define it, for this worker and to be loaded, it is loaded immediately.
        """
        spec = model_spec(self.settings)
        if spec is None:
            return None
        try:
            payload: Any = self._broker.get(WANTED_KEY)
            wanted = None if payload is None else decode_wanted(payload).find(spec.name)
        except (redis.RedisError, ValueError, msgspec.MsgspecError) as exc:
            log.warning("wanted_deployments_unreadable", error=str(exc))
            wanted = None
        is_own = wanted is None or (
            wanted.spec == spec and wanted.state == WantedState.LOADED and wanted.pools.get(spec.name) == ALL_WORKERS
        )
        return LocalReplica(self.replica_id, spec) if is_own else None

    def _home_pool(self) -> list[str]:
        spec = model_spec(self.settings)
        return [] if spec is None else [spec.name]

    def _load(self, replica: LocalReplica) -> None:
        """Load the replica's model and start its engine."""
        write_log = ProgressLog()

        def note_progress(done: int, total: int) -> None:
            replica.loaded_bytes, replica.total_bytes = done, total
            write_log(done, total)

        started = time.monotonic()
        if replica.spec.upstream is not None and replica.spec.upstream.engine == UpstreamEngine.MANAGED:
            return self._load_managed(replica, replica.spec.upstream, started)
        if replica.spec.upstream is not None:
            broker = valkey.connect_async(self.settings.valkey_url, valkey.WORKER)
            client = Relay(replica.spec, self.credentials, self._publisher.deliver, self._on_broken, broker)
            upstream = replica.spec.upstream
            loaded = LoadedEngine(client, describe_upstream(upstream), upstream.concurrency, None)
            return replica.finish_load(loaded, time.monotonic() - started)
        config = make_engine_config(self.settings, replica.spec, self._placement.threads, note_progress)
        # Before the load, so that gateways read it meanwhile.
        bundle = self._bundles.publish(replica.spec.key, config.model_dir)
        self._bundles.start()  # only now, so that conversions for models on demand do not delay this model
        with self._placement.bind():
            machine = describe_machine(config)
            engine = make_engine(config)
            resident = ResidentEngine(engine, self._publisher.deliver, self._on_broken)
        weights = fingerprint_weights(config.model_dir)
        machine = msgspec.structs.replace(machine, slow=engine.slow, bundle=bundle, weights=weights)
        seconds = time.monotonic() - started
        log.info("model_loaded", model=replica.spec.name, version=replica.spec.version, seconds=round(seconds, 2))
        pins = SharedPins(self._broker, config.block_size)
        replica.finish_load(LoadedEngine(resident, machine, config.max_num_seqs, pins), seconds)

    def _load_managed(self, replica: LocalReplica, upstream: UpstreamSpec, started: float) -> None:
        """Start the deployment's server, and a relay to it."""
        server = start_server(
            replica.spec,
            programs=self.settings.managed_programs,
            worker_secret=self.settings.worker_secret,
            logs=self.settings.data_dir / "logs",
            is_abandoned=lambda: replica.is_abandoned,
        )
        try:
            client = ManagedEngine(replica.spec, server, self.credentials, self._publisher.deliver, self._on_broken)
        except BaseException:
            server.stop()
            raise
        seconds = time.monotonic() - started
        log.info("managed_server_healthy", model=replica.spec.name, seconds=round(seconds, 2))
        replica.finish_load(LoadedEngine(client, describe_upstream(upstream), upstream.concurrency, None), seconds)
        client.watch(lambda reason: replica.lose_engine(reason, FIRST_RESTART_SECONDS, MAX_RESTART_SECONDS))

    def _heartbeats(self, beat: int) -> Mapping[str, Heartbeat]:
        self._space.look()
        disk_low = self._room() == 0
        accepts, draining = not self.broken.is_set() and not disk_low, self._draining.is_set()
        return {
            replica.id: replica.heartbeat(beat, accepts=accepts, draining=draining, disk_low=disk_low)
            for replica in self.replicas.replicas
        }

    def _replica_records(self) -> list[ReplicaRecord]:
        return [record for replica in self.replicas.replicas for record in replica.new_records()]

    def _unsettled_usage(self) -> UnsettledUsage | None:
        name = worker_of(self.replica_id)
        return describe_unsettled(self._publisher.unsettled, name, host_name(), self.replica_id)

    def _on_broken(self) -> None:
        self.broken.set()
