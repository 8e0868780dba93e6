"""The deployments that the platform serves: those of the catalog, or of the settings until the first import."""

from __future__ import annotations

from typing import NamedTuple

from django.conf import settings

from inference_worker.contract.deployments import WantedState
from inference_worker.contract.settings import ModelSpec
from millrace.apps.deployments.models import Deployment, RemovedDeployment
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope


def served_specs(*, wanted_loaded: bool = False) -> tuple[ModelSpec, ...]:
    """Return the deployments of the catalog; those of the settings until the first import.

    Args:
        wanted_loaded: without the drained and unloaded ones.
    """
    with all_tenants_scope(BypassReason.OPERATOR):
        served = served_states()
    return tuple(spec for spec, state, _ in served if not wanted_loaded or state == WantedState.LOADED)


class ServedState(NamedTuple):
    """A deployment with the state that an operator wants it to have."""

    spec: ModelSpec
    state: WantedState = WantedState.LOADED
    idle_seconds: int = 0


def served_states() -> list[ServedState]:
    """Return the deployments of the catalog; those of the settings until the first import.

    Inside `all_tenants_scope(…)`.
    """
    rows = list(Deployment.objects.all())
    if not rows and not RemovedDeployment.objects.exists():
        return [ServedState(spec) for spec in settings.MILLRACE.models]
    return [ServedState(row.spec, WantedState(row.state), row.idle_seconds) for row in rows]
