"""The worker's Celery app: it receives wakeups and passes them to one resident engine. Does not import Django.

Start it with `python -m inference_worker`.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
from typing import Any

from celery import Celery, signals
from kombu import Exchange, Queue

from inference_worker.contract.logs import configure_logging
from inference_worker.contract.messages import INFERENCE_KEY_PREFIX, Wakeup, replica_queue
from inference_worker.contract.process_memory import release_code, trim_heap
from inference_worker.contract.readiness import report_ready
from inference_worker.contract.settings import WorkerSettings, worker_settings
from inference_worker.worker.worker import Worker, new_replica_id

GENERATE = "millrace.generate"


def make_app(settings: WorkerSettings) -> Celery:
    # Without Celery's support of Django, which would import Django if the environment names its settings.
    app = Celery("inference_worker", broker=settings.valkey_url, set_as_current=False, fixups=[])
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        task_ignore_result=True,
        task_acks_late=True,
        worker_prefetch_multiplier=1,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        # Valkey rejects writes while a full disk prevents its own log. The error is temporary, like a lost connection.
        broker_channel_error_retry=True,
        # Received wakeups are counted in memory, not in Valkey. If the process ends, its queue is never read again, and
        # the gateways send the wakeups of its executions to another replica.
        broker_transport_options={
            "ack_emulation": False,
            "socket_keepalive": True,
            "global_keyprefix": INFERENCE_KEY_PREFIX,
        },
    )
    return app


settings = worker_settings()
configure_logging(settings.log_level, settings.log_format)
for chatty in ("celery.worker.strategy", "celery.app.trace"):  # they log two lines per request
    logging.getLogger(chatty).setLevel(logging.WARNING)
replica_id = new_replica_id(settings)
app = make_app(settings)
_queue = replica_queue(replica_id)
app.conf.task_queues = [Queue(_queue, Exchange(_queue), routing_key=_queue)]


_resident: list[Worker] = []  # the process's worker, after its model is loaded


@app.task(name=GENERATE)
def generate(wakeups: list[Wakeup], replica_id: str = "") -> None:
    """Claim the executions of a gateway's task for a replica, and those that follow shortly."""
    names = [(str(request), int(execution), int(attempt)) for request, execution, attempt in wakeups]
    _resident[0].run_task(names, str(replica_id))


@signals.setup_logging.connect
def _set_up_logging(**_: Any) -> None:
    configure_logging(settings.log_level, settings.log_format)


@signals.worker_init.connect
def _load(**_: Any) -> None:
    try:
        worker = Worker(settings, replica_id)
    except SystemExit as exc:
        logging.getLogger(__name__).error("worker_start_refused: %s", exc)
        os._exit(1)
    except BaseException:  # Celery ignores exceptions of signals, and would continue without a model
        logging.getLogger(__name__).exception("worker_start_failed")
        os._exit(1)
    _resident.append(worker)
    # The objects of torch and the model are permanent. Without this, full collections would scan them and delay a step.
    gc.collect()
    gc.freeze()
    trim_heap()
    release_code()
    threading.Thread(target=_stop_when_broken, args=(worker,), daemon=True).start()


@signals.worker_ready.connect
def _report_ready(**_: Any) -> None:
    report_ready()


@signals.worker_shutting_down.connect
def _drain(**_: Any) -> None:
    # Called by the signal handler, which must not block: another thread drains.
    threading.Thread(target=_resident[0].drain, name="drain").start()


@signals.worker_shutdown.connect
def _close(**_: Any) -> None:
    for worker in _resident:
        worker.drain()
        worker.close()


def _stop_when_broken(worker: Worker) -> None:
    """Stop the process after an engine failure. The parent process starts a new one."""
    worker.broken.wait()
    os.kill(os.getpid(), signal.SIGTERM)
