"""The thread that rings: a Celery task names legs to a replica. `apply_async` would block the event loop for 0.4 ms."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict

import structlog
from celery import Celery
from kombu.exceptions import OperationalError

from inference_worker.protocol import replica_queue

log = structlog.get_logger(__name__)

GENERATE = "millrace.generate"
DOORBELLS_A_TASK = 16
Doorbell = tuple[str, int, int]  # request id, leg, attempt


class Feeder:
    """Publishes doorbells. One that is lost is rung again by the dispatcher."""

    def __init__(self, broker_url: str) -> None:
        self._celery = Celery("gateway", broker=broker_url, set_as_current=False)
        self._celery.conf.update(task_serializer="json", broker_transport_options={"socket_keepalive": True})
        self._queue: queue.SimpleQueue[tuple[str, Doorbell] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self._thread.start()

    def ring(self, replica_id: str, doorbell: Doorbell) -> None:
        self._queue.put((replica_id, doorbell))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._celery.close()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            # What came meanwhile goes along. A worker's thread waits for all a task names, so there are at most as many
            # waiting threads as legs, and a replica is sent no more legs than it has credits.
            by_replica: defaultdict[str, list[Doorbell]] = defaultdict(list)
            by_replica[item[0]].append(item[1])
            closing = self._gather(by_replica)
            for replica_id, doorbells in by_replica.items():
                for start in range(0, len(doorbells), DOORBELLS_A_TASK):
                    self._publish(replica_id, doorbells[start : start + DOORBELLS_A_TASK])
            if closing:
                return

    def _gather(self, by_replica: defaultdict[str, list[Doorbell]]) -> bool:
        try:
            while (item := self._queue.get_nowait()) is not None:
                by_replica[item[0]].append(item[1])
        except queue.Empty:
            return False
        return True

    def _publish(self, replica_id: str, doorbells: list[Doorbell]) -> None:
        try:
            self._celery.send_task(GENERATE, args=[doorbells], queue=replica_queue(replica_id))
        except (OperationalError, OSError) as fault:
            log.warning("doorbells_lost", replica_id=replica_id, doorbells=len(doorbells), error=str(fault))
