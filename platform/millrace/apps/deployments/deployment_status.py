"""The current state of deployments: the catalog compared with the replicas' heartbeats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from inference_worker.contract.compute_support import read_refusal
from inference_worker.contract.deployments import WantedState
from inference_worker.contract.messages import Heartbeat, ReplicaPhase, process_of, worker_of
from millrace.apps.deployments.fleet_status import FleetStatus, ReplicaState, ReplicaStatus
from millrace.apps.deployments.models import Deployment


class DeploymentState(StrEnum):
    """The state of a deployment."""

    READY = "ready"
    UPDATING = "updating"  # an earlier version serves until the wanted one is ready
    LOADING = "loading"
    PENDING = "pending"  # no worker has started to load it
    DEGRADED = "degraded"  # serves with fewer replicas than wanted
    FAILED = "failed"
    SCALED_TO_ZERO = "scaled_to_zero"  # unloaded after idle time; a request loads it
    DRAINING = "draining"
    DRAINED = "drained"
    UNLOADED = "unloaded"
    UNKNOWN = "unknown"  # Valkey is unavailable


@dataclass(frozen=True)
class DeploymentStatus:
    """A deployment and its replicas."""

    deployment: Deployment
    state: DeploymentState
    replicas: tuple[ReplicaStatus, ...]
    ready: int  # replicas that accept requests
    wanted: int | None  # replicas that the catalog asks for; None: one on each worker of a pool
    bundle_failure: str = ""  # why a gateway cannot load the model's bundle

    @property
    def version(self) -> str:
        return self.deployment.spec.version

    @property
    def reason(self) -> str:
        """Why a replica or a gateway could not load the model, also while it is repeated; empty if none failed."""
        failed = next((each.beat.reason for each in self.replicas if each.beat.reason), "")
        return read_refusal(failed or self.bundle_failure)

    @property
    def namesakes(self) -> list[ReplicaStatus]:
        """Replicas of different processes whose workers have the same name."""
        processes = {process_of(each.id) for each in self.replicas}
        workers = Counter(worker_of(process) for process in processes)
        return [each for each in self.replicas if workers[each.worker] > 1]

    @property
    def loading(self) -> Heartbeat | None:
        """The heartbeat of a replica that is being loaded, if any."""
        return next((each.beat for each in self.replicas if each.beat.phase == ReplicaPhase.LOADING), None)

    @property
    def progress_percent(self) -> int | None:
        """The share of the model that is loaded; None if it is unknown or nothing is loaded."""
        beat = self.loading
        return None if beat is None or not beat.total_bytes else 100 * beat.loaded_bytes // beat.total_bytes

    @property
    def running(self) -> int:
        return sum(each.load for each in self.replicas)

    @property
    def load_seconds(self) -> float | None:
        """The measured duration of the last load."""
        return max((each.beat.load_ms / 1000 for each in self.replicas if each.beat.load_ms), default=None)

    @property
    def kv_percent(self) -> int | None:
        """The used share of the KV cache; None without one."""
        blocks = sum(each.beat.kv_blocks for each in self.replicas)
        return None if not blocks else 100 * sum(each.beat.kv_blocks_used for each in self.replicas) // blocks


def deployment_status(deployment: Deployment, board: FleetStatus | None) -> DeploymentStatus:
    """Return the state of one deployment. Without `board`, Valkey is unavailable."""
    live = () if board is None else tuple(status for status in board.replicas if status.state != ReplicaState.SILENT)
    replicas = tuple(status for status in live if status.beat.model == deployment.name)
    ready = sum(status.state == ReplicaState.READY for status in replicas)
    counts: Mapping[str, int] = deployment.pools
    wanted = None if 0 in counts.values() else sum(counts.values())
    failure = "" if board is None else board.find_bundle_failure(deployment.name)
    state = DeploymentState.UNKNOWN if board is None else _state(deployment, replicas, wanted)
    if failure and deployment.state == WantedState.LOADED:
        state = DeploymentState.FAILED
    return DeploymentStatus(deployment, state, replicas, ready, wanted, failure)


def _state(deployment: Deployment, replicas: tuple[ReplicaStatus, ...], wanted: int | None) -> DeploymentState:
    phases = {status.beat.phase for status in replicas}
    if deployment.state != WantedState.LOADED:
        is_unloaded = deployment.state == WantedState.UNLOADED
        is_serving = any(status.load for status in replicas) or ReplicaPhase.READY in phases
        if is_serving or (is_unloaded and ReplicaPhase.DRAINING in phases):  # it still has its weights
            return DeploymentState.DRAINING
        return DeploymentState.UNLOADED if is_unloaded else DeploymentState.DRAINED
    version = deployment.spec.version
    ready = [status.beat.version for status in replicas if status.state == ReplicaState.READY]
    current = ready.count(version)
    if current and (wanted is None or current >= wanted) and ReplicaPhase.FAILED not in phases:
        return DeploymentState.READY
    if ReplicaPhase.FAILED in phases:
        return DeploymentState.DEGRADED if ready else DeploymentState.FAILED
    if ready and not current:
        return DeploymentState.UPDATING
    if ReplicaPhase.LOADING in phases:
        return DeploymentState.LOADING if not current else DeploymentState.DEGRADED
    if current:
        return DeploymentState.DEGRADED
    return DeploymentState.SCALED_TO_ZERO if ReplicaPhase.UNLOADED in phases else DeploymentState.PENDING
