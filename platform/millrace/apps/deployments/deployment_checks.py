"""Checks of a deployment before it is added or changed: its source, the workers of its pools, and its base URL."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import redis

from inference_worker.checkpoints.encoder_config import model_task
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.contract.compute_support import find_refusal
from inference_worker.contract.deployments import ALL_WORKERS, WantedState
from inference_worker.contract.texts import Text, text_of
from inference_worker.contract.upstreams import UpstreamEngine
from millrace.apps.deployments.fleet_status import FleetStatus, read_fleet_status
from millrace.apps.deployments.models import GENERATE, MILLRACE, Deployment
from millrace.apps.deployments.source_checks import check_source
from millrace.apps.deployments.value_checks import check_credential, check_new_secret, check_values, make_base_url_error
from tenants.actions import ActionRefused, Conflict
from tenants.actions.common import FieldRefused
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.webhooks.targets import TargetRefused, check_url

DEFAULT_POOLS = {"default": 1}
SOURCE_OPTIONS = ("source", "quantization", "max_model_len", "draft_model")  # options that the check of a source reads


class CheckedDeployment(NamedTuple):
    """The result of a check: the model's task, and why the options were not checked against workers."""

    task: str
    unchecked: str = ""


def read_board() -> FleetStatus | None:
    """Return the replicas and their workers, or None if Valkey cannot be reached."""
    try:
        return read_fleet_status()
    except redis.RedisError:
        return None


def check_deployment(
    name: str, source: str = "", *, secret: str | None = None, force: bool = False, **options: Any
) -> CheckedDeployment:
    """Check a deployment's values and its source without changing anything. An upstream is not called.

    Args:
        force: leave out the check of the source, which its workers may have and this machine not.

    Raises:
        Conflict: the name is taken. ActionRefused: a value is invalid, or the source cannot be served.
    """
    row = Deployment(name=name, source=source, state=WantedState.LOADED, **{"pools": DEFAULT_POOLS, **options})
    check_values(row)
    check_new_secret(row, secret)
    with all_tenants_scope(BypassReason.OPERATOR):
        if Deployment.objects.filter(name=name).exists():
            raise Conflict(
                Text("The deployment %(name)s exists already. Choose another name, or update it.", name=repr(name))
            )
        check_credential(row)
    if row.engine == MILLRACE:
        unchecked = check_workers(row, read_board())
        if not force:
            check_source(row.spec)
        return CheckedDeployment(model_task(row.source), unchecked)
    check_public(row)
    return CheckedDeployment(deployment_task(row))


def check_new_source(fields: dict[str, Any]) -> None:
    """Check the source of a deployment that is to be added, unless `force`, which is removed from its fields, is true.

    Call it outside of transactions: it reads the files of the source.

    Raises:
        Conflict: the name is taken. ActionRefused: a value is invalid, or the source cannot be served.
    """
    if not fields.pop("force", False) and fields.get("engine", MILLRACE) == MILLRACE:
        check_deployment(**fields)


def check_changed_source(name: str, changes: dict[str, Any]) -> None:
    """Check the source of a deployment whose changes concern it, as `check_new_source` does.

    Raises:
        ActionRefused: a value is invalid, or the source cannot be served.
    """
    force = changes.pop("force", False)
    with all_tenants_scope(BypassReason.OPERATOR):
        row = Deployment.objects.filter(name=name).first()
    if force or row is None or row.engine != MILLRACE:
        return
    concerned = any(option in changes and changes[option] != getattr(row, option) for option in SOURCE_OPTIONS)
    for option, value in changes.items():
        setattr(row, option, value)
    if concerned:
        check_values(row)
        check_source(row.spec)


def check_new_sources(entries: Iterable[dict[str, Any]]) -> None:
    """Check the sources of a file's deployments that do not exist yet. See `check_new_source`.

    Raises:
        ActionRefused: names the deployment.
    """
    with all_tenants_scope(BypassReason.OPERATOR):
        known = set(Deployment.objects.values_list("name", flat=True))
    for entry in entries:
        if entry["name"] in known:
            entry.pop("force", None)
            continue
        try:
            check_new_source(entry)
        except ActionRefused as exc:
            raise ActionRefused(
                Text("Deployment %(name)s: %(error)s", name=repr(entry["name"]), error=text_of(exc))
            ) from exc


def check_workers(row: Deployment, board: FleetStatus | None) -> str:
    """Check the options of the deployment's engine against what the running workers of its pools can compute with.

    Args:
        board: None if Valkey cannot be reached.

    Returns:
        Why the check was left out; empty if it was not.

    Raises:
        FieldRefused: with the text of the worker that refuses an option. A pool with a number of replicas needs one
            worker that does not.
    """
    if row.engine != MILLRACE or (row.dtype, row.kv_cache_dtype) == ("auto", "auto"):
        return ""
    if board is None:
        return Text("The options were not checked against workers, because Valkey cannot be reached.")
    try:
        has_kv_cache = model_task(row.source) == GENERATE
    except (ModelError, OSError, RuntimeError):  # its workers find the source, not this machine
        has_kv_cache = True
    unknown = []
    for pool, replicas in sorted(row.pools.items()):
        found = [
            find_refusal(
                worker.support,
                row.dtype,  # type: ignore[arg-type]
                row.kv_cache_dtype if has_kv_cache else "auto",  # type: ignore[arg-type]
            )
            for worker in board.workers
            if pool in worker.pools
        ]
        refusals = [refusal for refusal in found if refusal is not None]
        if not found:
            unknown.append(pool)
        elif refusals and (replicas == ALL_WORKERS or len(refusals) == len(found)):
            raise FieldRefused(refusals[0].option, "invalid", refusals[0].message)
    if not unknown:
        return ""
    return Text(
        "The options were not checked against workers: no worker of the pool %(unknown)s is running.",
        unknown=", ".join(unknown),
    )


def check_public(row: Deployment) -> None:
    """Check that the base URL of an upstream does not resolve to internal addresses, unless the deployment allows it.

    Call it outside of transactions: it can wait for a name server. Workers check the address of each connection again.

    Raises:
        FieldRefused: the host is internal.
    """
    if row.engine in (MILLRACE, UpstreamEngine.MANAGED) or row.allow_internal:
        return
    try:
        check_url(row.source, ())
    except TargetRefused as exc:
        raise make_base_url_error(exc) from exc


def deployment_task(row: Deployment) -> str:
    """Return the model's task: generate, embed or rerank."""
    return row.task if row.engine != MILLRACE else model_task(row.source)
