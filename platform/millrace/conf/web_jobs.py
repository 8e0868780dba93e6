"""The web jobs and beat in one process, which `millrace up` runs: `python -m millrace.conf.web_jobs`.

On several machines there may be any number of both, also as separate programs. One beat is active at a time
(millrace.conf.active_beat).
"""

from __future__ import annotations

import os
import threading

import structlog
from celery.beat import Service
from celery.signals import worker_ready, worker_shutdown

from millrace.conf.celery import app
from tenants.work import publish_announcement

log = structlog.get_logger(__name__)

STOP_SECONDS = 3.0
OPTIONS = (
    *("--pool=threads", "--concurrency=4", "--hostname=web@millrace"),
    *("--without-gossip", "--without-mingle", "--without-heartbeat"),
)


class BeatThread(threading.Thread):
    """Beat as a thread. If it fails, the process ends, so that the supervisor starts it again."""

    def __init__(self, service: Service) -> None:
        super().__init__(name="beat", daemon=True)
        self._service = service
        self._is_stopping = False

    def run(self) -> None:
        app.set_current()
        try:
            self._service.start()
        except BaseException:
            log.exception("beat_failed")
        if not self._is_stopping:
            os._exit(os.EX_SOFTWARE)

    def stop(self) -> None:
        """Let beat store when its tasks were sent last, and end its lease."""
        self._is_stopping = True
        self._service.stop()
        publish_announcement()  # which ends beat's wait
        self.join(STOP_SECONDS)


def make_service() -> Service:
    """Return beat's service with the platform's scheduler, since a service does not read the setting."""
    return Service(app, scheduler_cls=app.conf.beat_scheduler)


def main() -> None:
    beat = BeatThread(make_service())
    worker_ready.connect(lambda **_: beat.start(), weak=False)
    worker_shutdown.connect(lambda **_: beat.stop(), weak=False)
    app.worker_main(["worker", *OPTIONS])


if __name__ == "__main__":
    main()
