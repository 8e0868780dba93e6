"""The Celery application of the web jobs and of beat. Its tasks are the `tasks` modules of the Django apps.

Inference does not use it: inference_worker.worker.app is a separate application without Django.
"""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import beat_init, setup_logging, worker_ready

from billing.schedule import BEAT_SCHEDULE as BILLING
from inference_worker.contract.readiness import report_ready
from millrace.apps.alerts.schedule import BEAT_SCHEDULE as ALERTS
from millrace.apps.answer_caches.schedule import BEAT_SCHEDULE as ANSWER_CACHES
from millrace.apps.batches.schedule import BEAT_SCHEDULE as BATCHES
from millrace.apps.deployments.schedule import BEAT_SCHEDULE as DEPLOYMENTS
from millrace.apps.experiments.schedule import BEAT_SCHEDULE as EXPERIMENTS
from millrace.apps.feedback.schedule import BEAT_SCHEDULE as FEEDBACK
from millrace.apps.health.schedule import BEAT_SCHEDULE as HEALTH
from millrace.apps.request_log.schedule import BEAT_SCHEDULE as REQUEST_LOG
from millrace.conf import logs
from millrace.environment.configuration import platform_settings
from tenants.schedule import BEAT_SCHEDULE as TENANTS

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "millrace.conf.settings")

_settings = platform_settings()
_beat_schedule = ALERTS | ANSWER_CACHES | BATCHES | BILLING | DEPLOYMENTS | EXPERIMENTS | FEEDBACK | HEALTH
_beat_schedule |= REQUEST_LOG | TENANTS

app = Celery("millrace")
app.conf.update(
    broker_url=_settings.valkey_url,
    broker_connection_retry_on_startup=True,
    broker_channel_error_retry=True,  # Valkey rejects writes while its disk is full
    broker_transport_options={"visibility_timeout": 3600, "global_keyprefix": "millrace:web:"},
    accept_content=["json"],
    beat_schedule=_beat_schedule,
    beat_scheduler="millrace.conf.scheduler:WorkScheduler",
    result_backend=None,
    task_acks_late=True,
    task_default_queue="web",
    task_ignore_result=True,
    task_reject_on_worker_lost=True,
    task_serializer="json",
    task_time_limit=900,
    timezone="UTC",
    worker_enable_remote_control=False,
    worker_prefetch_multiplier=1,
    worker_send_task_events=False,
)
app.autodiscover_tasks()


@setup_logging.connect
def _set_up_logging(**_: Any) -> None:
    """Prevent Celery from installing its own log handlers."""
    logs.configure({"level": _settings.log_level, "format": _settings.log_format})


@worker_ready.connect
@beat_init.connect
def _report_ready(**_: Any) -> None:
    report_ready()
