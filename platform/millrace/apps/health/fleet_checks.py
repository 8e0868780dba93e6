"""Health checks of the fleet: replicas, workers, upstreams, queues and the settler, by the fleet status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime

from django.conf import settings

from inference_worker.contract.compute_support import read_refusal
from inference_worker.contract.messages import Heartbeat, ReplicaPhase
from inference_worker.contract.settings import deployment_name
from inference_worker.contract.texts import Text
from millrace.apps.deployments.fleet_status import FleetStatus, ReplicaState, ReplicaStatus
from millrace.apps.deployments.gateway_heartbeat import HitRate
from millrace.apps.deployments.served_deployments import served_specs
from millrace.apps.health.issues import MIN_REQUESTS, HealthIssue, IssueType
from millrace.apps.health.left_usage import check_left_usage

QUEUE_SHARE = 3  # a request waits too long after a third of the maximum wait
MAX_HIT_RATE_DIFFERENCE = 0.1  # predicted minus real cache hit rate of a replica that is acceptable
MAX_NAMESAKES = 5  # workers with one name that an issue lists
MAX_VARIANTS = 5  # replicas of one deployment that an issue lists
DIGITS = 8  # digits of an identity of files that an issue shows
SETTLEMENT_LATE_MS = 60_000


def describe_unreachable_broker() -> HealthIssue:
    """Return the issue that Valkey cannot be reached."""
    return HealthIssue(
        IssueType.BROKER,
        "",
        urgent=True,
        title=Text("Broker unavailable"),
        todo=Text("New requests are rejected with 503 until Valkey is back. Check its process and disk."),
    )


def _check_models(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    for spec in served_specs(wanted_loaded=True):
        if board.count_ready(spec.name) or board.is_loadable(spec.name):
            continue
        there = [
            replica
            for replica in board.replicas
            if replica.beat.model == spec.name and replica.state != ReplicaState.SILENT
        ]
        cordoned = [
            replica
            for replica in there
            if replica.state in (ReplicaState.CORDONED, ReplicaState.DRAINING, ReplicaState.DRAINED)
        ]
        yield HealthIssue(
            IssueType.MODEL,
            spec.name,
            urgent=True,
            title=Text("No replica available for %(name)s", name=spec.name),
            todo=Text("Uncordon one of its workers.") if cordoned else _describe_absence([each.beat for each in there]),
        )


def _describe_absence(beats: Sequence[Heartbeat]) -> str:
    """Return why no replica serves a model, and what to do."""
    failed = next((beat.reason for beat in beats if beat.reason), "")  # also while its load is repeated
    if failed:
        return Text("It could not be loaded: %(failed)s", failed=read_refusal(failed))
    if any(beat.phase == ReplicaPhase.LOADING for beat in beats):
        return Text("A worker is loading it. Its requests receive 503 until then.")
    if not beats:
        return Text("No running worker has it. Its requests receive 503. Start a worker of its pools.")
    return Text("Its requests receive 503. Check the worker logs.")


def _check_failed_loads(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    """Report replicas that could not be loaded while others serve the model."""
    for replica in board.replicas:
        beat = replica.beat
        if replica.state != ReplicaState.SILENT and beat.reason and board.count_ready(beat.model):
            yield HealthIssue(
                IssueType.REPLICA,
                replica.id,
                urgent=False,
                title=Text("%(replica)s could not load %(model)s", replica=replica.name, model=beat.model),
                todo=read_refusal(beat.reason),
            )


def _check_bundles(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    """Report deployments whose bundle a gateway refuses. Their replicas may be ready."""
    for name in sorted({name for gateway in board.gateways for name in gateway.presence.failures}):
        yield HealthIssue(
            IssueType.BUNDLE,
            name,
            urgent=True,
            title=Text("A gateway cannot load %(name)s", name=name),
            todo=Text("Its model bundle was refused: %(reason)s", reason=board.find_bundle_failure(name)),
        )


def _check_variants(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    """Report deployments whose replicas compute with different files or dtypes."""
    variants: dict[str, dict[bytes, ReplicaStatus]] = {}
    for replica in board.replicas:
        if replica.state != ReplicaState.SILENT and replica.beat.machine is not None and replica.beat.machine.bundle:
            variants.setdefault(replica.beat.deployment_key, {}).setdefault(replica.beat.machine.variant, replica)
    for key, found in sorted(variants.items()):
        if len(found) > 1:
            described = "; ".join(_describe_variant(replica) for replica in list(found.values())[:MAX_VARIANTS])
            yield HealthIssue(
                IssueType.VARIANT,
                deployment_name(key),
                urgent=False,
                title=Text("Replicas of %(name)s differ", name=deployment_name(key)),
                todo=Text(
                    "They share no cached prefixes, and may answer equal requests differently: %(described)s. Use the"
                    " same model files on all workers, and set a dtype for the deployment.",
                    described=described,
                ),
            )


def _describe_variant(replica: ReplicaStatus) -> str:
    """Return what distinguishes a replica: the dtype, and the identities of its configuration and weights."""
    machine = replica.beat.machine
    if machine is None:
        return replica.name
    return f"{replica.name}: {machine.dtype}, {machine.bundle[:DIGITS]}/{machine.weights[:DIGITS]}"


def _check_upstreams(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    """Report upstreams that are down for all their replicas, and those that fail only for some tenants.

    For a replica without requests since its start, the upstream is up.
    """
    beats_by_model: dict[str, list[Heartbeat]] = {}
    for replica in board.replicas:
        if replica.state not in (ReplicaState.SILENT, ReplicaState.STARTING):
            beats_by_model.setdefault(replica.beat.model, []).append(replica.beat)
    for model, beats in sorted(beats_by_model.items()):
        paused = max(beat.tenants_paused for beat in beats)
        if all(beat.circuit_open for beat in beats):
            yield HealthIssue(
                IssueType.UPSTREAM,
                model,
                urgent=True,
                title=Text("The upstream of %(model)s is down", model=model),
                todo=Text(
                    "Its last requests failed, and new ones are rejected until a probe succeeds. Check the upstream."
                ),
            )
        elif paused:
            yield HealthIssue(
                IssueType.UPSTREAM_PAUSE,
                model,
                urgent=False,
                title=Text(
                    "The upstream of %(model)s fails for %(number)s tenant",
                    "The upstream of %(model)s fails for %(number)s tenants",
                    model=model,
                    number=paused,
                ),
                todo=Text(
                    "Their last requests failed, and new ones are paused until a probe succeeds. See the request log."
                ),
            )


def _check_replicas(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    for replica in board.replicas:
        if replica.state == ReplicaState.SILENT:
            if replica.age_ms is None:
                title = Text("%(replica)s sent no heartbeat for more than a minute", replica=replica.id)
            else:
                seconds = replica.age_ms // 1000
                title = Text("%(replica)s sent no heartbeat for %(seconds)s s", replica=replica.id, seconds=seconds)
            yield HealthIssue(
                IssueType.REPLICA,
                replica.id,
                urgent=False,
                title=title,
                todo=Text("The replica receives no new requests. After 10 s its streams fail. Check its process."),
            )


def _check_namesakes(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    """Report running workers that have the same name."""
    for name, workers in board.find_namesakes().items():
        described = ", ".join(
            f"{worker.id} on {worker.host or 'an unknown machine'}" for worker in workers[:MAX_NAMESAKES]
        )
        yield HealthIssue(
            IssueType.WORKER_NAME,
            name,
            urgent=True,
            title=Text("%(count)s workers have the name %(name)s", count=len(workers), name=name),
            todo=Text(
                "They share a journal and slots: %(described)s. Set another MILLRACE_WORKER_NAME for all but one.",
                described=described,
            ),
        )


def _check_disks(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    for replica in board.replicas:
        if replica.state == ReplicaState.DISK_LOW:
            yield HealthIssue(
                IssueType.DISK,
                replica.id,
                urgent=True,
                title=Text("%(replica)s accepts no new requests: disk almost full", replica=replica.name),
                todo=Text(
                    "Free disk space for the state directory on its machine. The replica then recovers automatically."
                ),
            )


def _check_slow_replicas(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    for replica in board.replicas:
        machine = None if replica.beat is None else replica.beat.machine
        if machine is not None and machine.slow is not None:
            yield HealthIssue(
                IssueType.SLOW,
                replica.id,
                urgent=False,
                title=Text("%(replica)s is slow: %(cause)s", replica=replica.id, cause=machine.slow.cause),
                todo=machine.slow.instruction,
            )


def _check_queues(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    waits: dict[str, tuple[int, int]] = {}
    for gateway in board.gateways:
        for queue in gateway.presence.waiting:
            if not queue.batch:  # batches have no maximum wait
                depth, oldest = waits.get(queue.model, (0, 0))
                waits[queue.model] = depth + queue.requests, max(oldest, queue.oldest_ms)
    longest = settings.MILLRACE.queue_timeout_seconds * 1000
    for model, (depth, oldest) in sorted(waits.items()):
        if oldest * QUEUE_SHARE > longest:
            yield HealthIssue(
                IssueType.QUEUE,
                model,
                urgent=True,
                title=Text(
                    "%(depth)s requests waiting for %(model)s, oldest %(oldest)s s",
                    depth=depth,
                    model=model,
                    oldest=round(oldest / 1000),
                ),
                todo=Text(
                    "After %(longest)s s they receive 503. Add a replica or lower the limits of top senders.",
                    longest=longest // 1000,
                ),
            )


def _check_prefix_routing(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    """Yield replicas that have cached much less of the prompts than their digests predict, as any gateway sees it."""
    rates: dict[str, HitRate] = {}
    for rate in (rate for gateway in board.gateways for rate in gateway.presence.hit_rates):
        if rate.requests >= MIN_REQUESTS and rate.difference >= MAX_HIT_RATE_DIFFERENCE:
            rates[rate.replica] = max(rates.get(rate.replica, rate), rate, key=lambda each: each.difference)
    for replica, rate in sorted(rates.items()):
        yield HealthIssue(
            IssueType.PREFIX_ROUTING,
            replica,
            urgent=False,
            title=Text(
                "Cache hit rate of %(replica)s is %(difference)s of the prompt tokens below the prediction",
                replica=replica,
                difference=f"{rate.difference:.0%}",
            ),
            todo=Text(
                "Requests are sent to this replica for prompts that it has not cached. Check its KV cache size and"
                " evictions, and whether workers and gateways run the same release. Drain and restart the replica."
            ),
        )


def _check_settler(board: FleetStatus, now: datetime) -> Iterator[HealthIssue]:
    if not board.settler_runs:
        yield HealthIssue(
            IssueType.SETTLER,
            "",
            urgent=True,
            title=Text("No settler running"),
            todo=Text("Usage is queued in the broker and not billed yet. Start the settler."),
        )
    elif board.settler is not None and board.settler.lag_ms > SETTLEMENT_LATE_MS:
        seconds = board.settler.lag_ms // 1000
        yield HealthIssue(
            IssueType.SETTLER,
            "",
            urgent=False,
            title=Text(
                "%(backlog)s usage records to settle, oldest %(seconds)s s",
                backlog=board.settler.backlog,
                seconds=seconds,
            ),
            todo=Text("Budgets count reservations until then. Check the settler and PostgreSQL."),
        )


CHECKS: tuple[Callable[[FleetStatus, datetime], Iterable[HealthIssue]], ...] = (
    _check_models,
    _check_bundles,
    _check_upstreams,
    _check_queues,
    _check_prefix_routing,
    _check_settler,
    _check_replicas,
    _check_failed_loads,
    _check_slow_replicas,
    _check_namesakes,
    _check_variants,
    _check_disks,
    check_left_usage,
)
