"""The copy of the catalog in Valkey, which workers and gateways read twice a second.

It is written after each change and once a minute, which repairs a copy that was lost or not written.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import redis
import structlog
from django.conf import settings

from inference_worker.contract import valkey
from inference_worker.contract.deployments import (
    WANTED_KEY,
    WantedDeployment,
    WantedDeployments,
    encode_wanted,
)
from inference_worker.contract.managed_commands import sign_managed
from inference_worker.contract.upstreams import UpstreamEngine
from millrace.apps.deployments.catalog_lock import lock_catalog
from millrace.apps.deployments.models import Deployment, RemovedDeployment
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

log = structlog.get_logger(__name__)


def copy_deployments() -> int:
    """Replace the copy in Valkey. Returns the number of deployments.

    Raises:
        redis.RedisError: Valkey cannot be reached.
    """
    with all_tenants_scope(BypassReason.OPERATOR), valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker:
        lock_catalog()  # NOTE: locked while the copy is written, so that an older copy cannot replace a newer one
        wanted = WantedDeployments(tuple(_sign_deployment(row.wanted) for row in Deployment.objects.all()))
        is_imported = bool(wanted.deployments) or RemovedDeployment.objects.exists()
        if is_imported or broker.exists(WANTED_KEY):  # otherwise workers use their settings
            broker.set(WANTED_KEY, encode_wanted(wanted))
    return len(wanted.deployments)


def _sign_deployment(wanted: WantedDeployment) -> WantedDeployment:
    """Return the deployment with the signature of its command, if it is managed."""
    spec, secret = wanted.spec, settings.MILLRACE.worker_secret
    if spec.upstream is None or spec.upstream.engine != UpstreamEngine.MANAGED:
        return wanted
    upstream = replace(spec.upstream, signature=sign_managed(spec.name, spec.upstream, secret))
    return msgspec.structs.replace(wanted, spec=replace(spec, upstream=upstream))


def publish_copy() -> None:
    """Replace the copy in Valkey after a change. If Valkey cannot be reached, the next task replaces it."""
    try:
        copy_deployments()
    except redis.RedisError as exc:
        log.warning("deployment_sync_failed", error=str(exc))
