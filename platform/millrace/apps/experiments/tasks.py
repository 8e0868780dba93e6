"""Web jobs of experiments. `schedule.py` contains their schedule."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import structlog
from celery import shared_task
from django.conf import settings

from millrace.apps.experiments.counting import count_due
from millrace.apps.experiments.models import ArmTotal, ExperimentPoint, Observation, UnitTotal
from millrace.apps.experiments.results import ExperimentResults, find_harm, read_results, read_sums
from tenants import actions
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Experiment, Tenant

log = structlog.get_logger(__name__)

LATE_DAYS = 7  # after its end, feedback still changes the results of an experiment
DELETE_BATCH_SIZE = 5_000
MAX_BATCHES = 200  # batches of one experiment in one run


@shared_task(name="experiments.evaluate")
def evaluate(now: datetime | None = None) -> int:
    """Count the due observations of all experiments, store their results, and stop those with harm.

    Returns the number of counted observations.
    """
    now = now or datetime.now(UTC)
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        running = Experiment.objects.all_tenants().filter(state=Experiment.State.RUNNING)
        late = Experiment.objects.all_tenants().filter(stopped_at__gte=now - timedelta(days=LATE_DAYS))
        experiments = list((running | late).order_by("pk"))
    counted = 0
    for experiment in experiments:
        try:
            counted += _evaluate(experiment, now)
        except Exception:  # the other experiments must not be affected
            log.exception("experiment_evaluation_failed", experiment_id=experiment.pk, tenant_id=experiment.tenant_id)
    return counted


def _evaluate(experiment: Experiment, now: datetime) -> int:
    counted = 0
    for _ in range(MAX_BATCHES):
        batch = count_due(experiment, now)
        counted += batch
        if not batch:
            break
    if not counted and experiment.state != Experiment.State.RUNNING:
        return 0
    with tenant_scope(experiment.tenant_id):
        results = read_results(experiment, now)
        harm = find_harm(experiment, results, read_sums(experiment))
        _store_point(results, now)
    if experiment.state != Experiment.State.RUNNING:
        return counted
    if harm:
        actions.do_stop_experiment(experiment, Experiment.StopReason.HARM, harm)
        log.warning("experiment_stopped", experiment_id=experiment.pk, tenant_id=experiment.tenant_id, metric=harm)
    elif experiment.started_at is not None and now >= experiment.started_at + timedelta(days=experiment.planned_days):
        actions.do_stop_experiment(experiment, Experiment.StopReason.ENDED)
    return counted


def _store_point(results: ExperimentResults, now: datetime) -> None:
    """Store the results of this hour. The last ones of an hour are kept."""
    experiment = results.experiment
    changes = [
        {
            change.metric.name: None
            if change.interval is None
            else [float(value) for value in (change.interval.estimate, change.interval.low, change.interval.high)]
            for change in arm.changes
        }
        for arm in results.arms[1:]
    ]
    hour = min(now, experiment.stopped_at or now).replace(minute=0, second=0, microsecond=0)
    point = ExperimentPoint(
        tenant_id=experiment.tenant_id,
        experiment_id=experiment.pk,
        hour=hour,
        requests=results.requests,
        sample_ratio_p=results.sample_ratio_p,
        changes=changes,
    )
    ExperimentPoint.objects.for_tenant(experiment.tenant_id).bulk_create(
        [point],
        update_conflicts=True,
        update_fields=["requests", "sample_ratio_p", "changes"],
        unique_fields=["tenant_id", "experiment_id", "hour"],
    )


@shared_task(name="experiments.purge_expired")
def purge_expired(now: datetime | None = None) -> int:
    """Remove observations older than the request log, and all rows of purged tenants. Returns the number of rows.

    The results of an experiment are kept.
    """
    now = now or datetime.now(UTC)
    before = now - timedelta(days=settings.MILLRACE.request_log_retention_days)
    removed = 0
    with all_tenants_scope(BypassReason.HOUSEKEEPING):
        purged = Tenant.objects.all_tenants().filter(status=Tenant.Status.PURGED).values("id")
        for model in (Observation, UnitTotal, ArmTotal, ExperimentPoint):
            removed += model.objects.all_tenants().filter(tenant_id__in=purged).delete()[0]
    while True:
        with all_tenants_scope(BypassReason.HOUSEKEEPING):
            rows = Observation.objects.all_tenants().filter(added_at__lt=before)
            batch = list(rows.values_list("pk", flat=True)[:DELETE_BATCH_SIZE])
            removed += Observation.objects.all_tenants().filter(pk__in=batch).delete()[0] if batch else 0
        if len(batch) < DELETE_BATCH_SIZE:
            return removed
