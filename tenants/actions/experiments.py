"""Actions on experiments. The names of metrics are checked by the caller, who has their definitions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from django.db import IntegrityError, transaction

from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions.common import Conflict, FieldRefused, insert, locked_tenant, refuse_problems
from tenants.keys.key_snapshots import rebuild_key_snapshots
from tenants.models import ChangeEventRow, Experiment, Tenant, User
from tenants.models.experiments import MAX_DAYS
from tenants.notifications.events import notify_stopped
from tenants.routing_policies.experiments import MAX_ARMS, ExperimentArm
from tenants.routing_policies.target_checks import TargetChecks

MAX_EXPERIMENTS = 500  # per tenant
MAX_NAME_LENGTH = 64


def do_create_experiment(
    tenant: Tenant,
    *,
    name: str,
    model: str,
    arms: Sequence[Mapping[str, Any]],
    primary_metric: str,
    guardrails: Mapping[str, float],
    unit: str = Experiment.Unit.END_USER,
    metadata_key: str = "",
    planned_days: int = 14,
    created_by: User | None = None,
) -> Experiment:
    """Create an experiment as a draft.

    Raises:
        ActionRefused: a value is not valid. Conflict: the name is taken, or the tenant has too many experiments.
    """
    _check_arms(arms, unit)
    if not name.strip() or not model.strip():
        raise FieldRefused("name" if model.strip() else "model", "required", Text("Enter a value."))
    if (unit == Experiment.Unit.METADATA) != bool(metadata_key):
        raise FieldRefused("metadata_key", "invalid", Text("Set it if, and only if, the unit is metadata."))
    if not 1 <= planned_days <= MAX_DAYS:
        raise FieldRefused("planned_days", "invalid", Text("Enter 1 to %(max_days)s days.", max_days=MAX_DAYS))
    if any(not math.isfinite(allowed) or not 0 <= allowed <= 10 for allowed in guardrails.values()):
        raise FieldRefused("guardrails", "invalid", Text("Enter a change from 0 to 10 (1,000%%)."))
    with locked_tenant(tenant) as locked:
        if Experiment.objects.for_tenant(locked).count() >= MAX_EXPERIMENTS:
            raise Conflict(
                Text(
                    "An organization can have %(max_experiments)s experiments. Delete drafts that you do not need.",
                    max_experiments=MAX_EXPERIMENTS,
                )
            )
        row = Experiment(
            tenant=locked,
            name=name,
            model=model,
            unit=unit,
            metadata_key=metadata_key,
            arms=[dict(arm) for arm in arms],
            primary_metric=primary_metric,
            guardrails=dict(guardrails),
            planned_days=planned_days,
            created_by=created_by,
        )
        insert(row, Text("An experiment named %(name)s exists already.", name=repr(name)))
        audit.record("experiment.created", row, tenant_id=locked.pk, after=audit.serialize_for_audit(row))
    return row


def do_start_experiment(experiment: Experiment) -> Experiment:
    """Start a draft. Gateways assign arms within a second.

    Raises:
        ActionRefused: the model of an arm cannot serve the tenant's requests.
        Conflict: it is not a draft, or another experiment runs on the model name.
    """
    with locked_tenant(experiment.tenant_id) as tenant:
        row = _find_current(tenant, experiment)
        if row.state != Experiment.State.DRAFT:
            raise Conflict(Text("Only a draft can be started."))
        refuse_problems("arms", TargetChecks(tenant.pk).of_experiment(row))
        before = audit.serialize_for_audit(row)
        row.state, row.started_at = Experiment.State.RUNNING, datetime.now(UTC)
        try:
            with transaction.atomic():
                row.save(update_fields=["state", "started_at"])
        except IntegrityError as exc:
            raise Conflict(Text("Another experiment runs on %(model)s. Stop it first.", model=repr(row.model))) from exc
        _record(tenant, "experiment.started", row, before)
    return row


def do_stop_experiment(
    experiment: Experiment, reason: str = Experiment.StopReason.USER, metric: str = ""
) -> Experiment | None:
    """Stop a running experiment. Its requests are routed as without it. Returns None if it does not run."""
    with locked_tenant(experiment.tenant_id) as tenant:
        row = _find_current(tenant, experiment)
        if row.state != Experiment.State.RUNNING:
            return None
        before = audit.serialize_for_audit(row)
        row.state, row.stopped_at = Experiment.State.STOPPED, datetime.now(UTC)
        row.stop_reason, row.stop_metric = reason, metric
        row.save(update_fields=["state", "stopped_at", "stop_reason", "stop_metric"])
        _record(tenant, "experiment.stopped", row, before)
        notify_stopped(row)
    return row


def do_delete_experiment(experiment: Experiment) -> bool:
    """Delete a draft. Returns False if it is already deleted.

    Raises:
        Conflict: it has been started. Its results are kept.
    """
    with locked_tenant(experiment.tenant_id) as tenant:
        row = Experiment.objects.for_tenant(tenant).filter(pk=experiment.pk).first()
        if row is None:
            return False
        if row.state != Experiment.State.DRAFT:
            raise Conflict(Text("Only a draft can be deleted."))
        audit.record("experiment.deleted", row, tenant_id=tenant.pk, before=audit.serialize_for_audit(row))
        row.delete()
    return True


def _find_current(tenant: Tenant, experiment: Experiment) -> Experiment:
    row = Experiment.objects.for_tenant(tenant).filter(pk=experiment.pk).first()
    if row is None:
        raise Conflict(Text("This experiment does not exist."))
    return row


def _record(tenant: Tenant, action: str, row: Experiment, before: Mapping[str, Any]) -> None:
    audit.record(action, row, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(row))
    rebuild_key_snapshots(tenant, ChangeEventRow.ChangeType.POLICY)


def _check_arms(arms: Sequence[Mapping[str, Any]], unit: str) -> None:
    if unit not in Experiment.Unit.values:
        raise FieldRefused(
            "unit", "invalid", Text("Choose one of %(values)s.", values=", ".join(Experiment.Unit.values))
        )
    try:
        found = [msgspec.convert(arm, ExperimentArm) for arm in arms]
    except msgspec.ValidationError as exc:
        raise FieldRefused("arms", "invalid", text_of(exc)) from exc
    if not 2 <= len(found) <= MAX_ARMS:
        raise FieldRefused("arms", "invalid", Text("An experiment has 2 to %(max_arms)s arms.", max_arms=MAX_ARMS))
    names = [arm.name for arm in found]
    if len(set(names)) < len(names) or not all(0 < len(name) <= MAX_NAME_LENGTH for name in names):
        raise FieldRefused(
            "arms",
            "invalid",
            Text(
                "Each arm needs a different name of up to %(max_length)s characters.",
                max_length=MAX_NAME_LENGTH,
            ),
        )
    if any(len(arm.model) > MAX_NAME_LENGTH for arm in found):
        raise FieldRefused(
            "arms",
            "invalid",
            Text("A model name has up to %(max_length)s characters.", max_length=MAX_NAME_LENGTH),
        )
    if any(not 1 <= arm.share <= 99 for arm in found) or sum(arm.share for arm in found) > 100:
        raise FieldRefused(
            "arms", "invalid", Text("Shares are 1 to 99 percent each, and 100 percent in total at most.")
        )
    if unit != Experiment.Unit.METADATA and len({arm.model for arm in found}) < len(found):
        raise FieldRefused("arms", "invalid", Text("Each arm needs a different model."))
