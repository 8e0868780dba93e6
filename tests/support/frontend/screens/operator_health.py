"""Screen of the operators' health page, with a busy, a silent and a cordoned replica."""

from __future__ import annotations

import hashlib
import os
import time
from datetime import UTC, datetime, timedelta

import redis

from inference_worker.contract import metric_families as families
from inference_worker.contract.messages import REPLICAS_KEY, Heartbeat, Machine, beat_key, encode
from inference_worker.contract.metric_families import HistogramSnapshot, MetricsSnapshot
from inference_worker.contract.texts import Text
from inference_worker.contract.unsettled_usage import UNSETTLED_KEY, UnsettledEntry, UnsettledUsage
from tests.support.frontend.console import Screen, World, register

FOR_LONG = 3_600_000  # milliseconds; these replicas have no process that sends another heartbeat


def speak(broker: redis.Redis, replica_id: str, model: str, *, running: int, minute: int = 0) -> None:
    counts = {name: {"": 1000.0 * minute} for name in (families.PROMPT_TOKENS, families.CACHE_QUERIES)}
    counts |= {families.CACHE_HITS: {"": 400.0 * minute}, families.PREEMPTIONS: {"": float(minute // 20)}}
    counts |= {families.GENERATION_TOKENS: {"": 300.0 * minute}, families.BATCHED_SEQUENCES: {"": 900.0 * minute}}
    counts |= {families.FORWARD_SECONDS: {"prefill": 10.0 * minute, "decode": 12.0 * minute}}
    bounds = {family.name: len(family.buckets) + 1 for family in families.HISTOGRAMS}
    reported = {
        families.TTFT: HistogramSnapshot([minute] * bounds[families.TTFT], 1.0),
        families.ITERATION_TOKENS: HistogramSnapshot([20 * minute] * bounds[families.ITERATION_TOKENS], 1.0),
    }
    beat = Heartbeat(
        *(time.time_ns(), model, True, False, running, running // 3, 32, 1024, 90 * running),
        metrics=MetricsSnapshot(counts, {families.MFU: 0.31}, reported),
        machine=Machine("0.1.0", "cpu", 8, "bfloat16", 8192, 32),
        cpu_seconds=200.0 * minute,
    )
    broker.hset(REPLICAS_KEY, replica_id, encode(beat))
    broker.set(beat_key(replica_id), "", px=FOR_LONG)


def leave_usage(broker: redis.Redis, tenant_id: int) -> None:
    """Write the report of a lost worker about its journal `journal`."""
    oldest = UnsettledEntry(time.time_ns() // 1000, "req_lost", 0, tenant_id, b"\x00" * 32)
    report = UnsettledUsage("smollm2-135m-2", "rack-7", "smollm2-135m-2.dd", 3, oldest, oldest)
    broker.hset(UNSETTLED_KEY, "journal", encode(report))


def prepare(world: World) -> None:
    from billing.models import Reconciliation, UsageQuarantine  # here: this file is read before Django is set up
    from millrace.apps.deployments.fleet_status import read_fleet_status
    from millrace.apps.health import history, tasks
    from millrace.apps.health.cordons import do_cordon
    from millrace.apps.health.costs import do_set_machine_cost
    from tenants.isolation.db_roles import BypassReason
    from tenants.isolation.scopes import all_tenants_scope

    now = datetime.now(UTC)
    with redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"]) as broker:
        broker.delete(REPLICAS_KEY)
        for minute in range(50):
            speak(broker, "smollm2-135m-0.aa", "smollm2-135m", running=3 + minute % 5, minute=minute)
            speak(broker, "smollm2-135m-int8-0.bb", "smollm2-135m-int8", running=minute % 3, minute=minute // 2)
            history.sample(read_fleet_status(), now - timedelta(minutes=49 - minute))
        speak(broker, "smollm2-135m-1.cc", "smollm2-135m", running=2)
        broker.delete(beat_key("smollm2-135m-1.cc"))
    do_cordon("smollm2-135m-int8-0", reason="a new kernel is tried")
    do_set_machine_cost("smollm2-135m", 400_000_000)
    with all_tenants_scope(BypassReason.COMMAND):
        for reason in UsageQuarantine.Reason:
            UsageQuarantine.objects.create(
                received_at=now,
                stream_id=f"1-{len(reason)}",
                reason=reason,
                detail=Text("there is no price version %(version)s", version="12"),
                payload=b"x" * 180,
                payload_hash=hashlib.sha256(reason.encode()).digest(),
            )
        over = world.tenants["over"].pk
        differences = [
            {"budget_period": 3, "tenant": over, "reserved": 12, "used": "40000"},
            {"journal": "smollm2-135m-0", "tenant": over, "tokens": 81, "requests": 1},
        ]
        Reconciliation.objects.create(created_at=now, budget_periods=12, differences=differences, corrected=1)
        row = UsageQuarantine.objects.order_by("pk").first()
    world.rows["populated.quarantined"] = row.pk
    tasks.run_health_checks()
    with redis.Redis.from_url(os.environ["MILLRACE_VALKEY_URL"]) as broker:
        leave_usage(broker, world.tenants["populated"].pk)
    world.rows["populated.journal"] = "journal"


register(
    Screen("operator-health", "/operator/", queries=64, who="operator", states=("populated", "error")),
    Screen(
        "operator-health-replay", "/operator/quarantine/{quarantined}/replay", 14, who="operator", states=("populated",)
    ),
    Screen(
        "operator-health-dismiss",
        "/operator/quarantine/{quarantined}/dismiss",
        14,
        who="operator",
        states=("populated",),
    ),
    Screen(
        "operator-health-dismiss-usage",
        "/operator/left-usage/{journal}/dismiss",
        14,
        who="operator",
        states=("populated",),
    ),
    prepare=prepare,
)
