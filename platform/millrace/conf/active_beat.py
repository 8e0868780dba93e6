"""The lease of the active beat: any number of beats may run, and one sends the periodic tasks.

The lease is a row with an expiry in PostgreSQL. The active beat renews it every RENEW_SECONDS, and stores when each
task was sent last. Another beat takes it when it has expired, and continues from these times. A beat that cannot renew
its lease stops sending before the lease expires, by its own monotonic clock. The fencing number increases with each
holder, so a renewal of an earlier holder changes nothing.

A restarted beat need not wait for the expiry of its predecessor's lease: the lock of the file `beat-lock` in their data
directory shows that the predecessor has ended.

A task can be sent twice: by a beat that is killed before it has stored the time, and by its successor.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import django.db
import structlog
from django.db import connection

from inference_worker.contract.lock_files import LockFile
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

log = structlog.get_logger(__name__)

LEASE_SECONDS = 30.0
MARGIN_SECONDS = 2.0  # before the lease's end, when its holder stops sending
RENEW_SECONDS = 10.0
RETRY_SECONDS = 1.0  # after PostgreSQL could not be reached
LOCK_NAME = "beat-lock"
LastRuns = dict[str, str]  # name of an entry -> time in ISO format

_TAKE = """
INSERT INTO operations_beatlease AS l (id, holder, place, fencing_number, expires_at, last_runs)
VALUES (1, %(holder)s, %(place)s, 1, clock_timestamp() + %(seconds)s * interval '1 second', '{}')
ON CONFLICT (id) DO UPDATE SET holder = excluded.holder, place = excluded.place, fencing_number = l.fencing_number + 1,
    expires_at = clock_timestamp() + %(seconds)s * interval '1 second'
WHERE l.expires_at <= clock_timestamp() OR l.place = excluded.place OR l.holder = excluded.holder
RETURNING l.fencing_number, l.last_runs::text
"""
_RENEW = """
UPDATE operations_beatlease SET last_runs = %(last_runs)s::jsonb,
    expires_at = clock_timestamp() + %(seconds)s * interval '1 second'
WHERE id = 1 AND holder = %(holder)s AND fencing_number = %(fencing_number)s
RETURNING fencing_number
"""


class ActiveBeat:
    """The lease of this process, if it has it."""

    def __init__(self, data_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holder = f"{socket.gethostname()[:64]} {os.getpid()} {secrets.token_hex(4)}"
        self._lock_path = data_dir / LOCK_NAME
        self._lock: LockFile | None = None
        self._place: str | None = None
        self.fencing_number = 0  # number of the lease that this process has or had
        self._is_holder = False  # whether it took the lease, and has not found another holder since
        self._until = float("-inf")  # until then this process is active
        self._renew_at = float("-inf")

    @property
    def is_active(self) -> bool:
        """Return whether this process may send tasks."""
        return self._clock() < self._until

    @property
    def seconds_until_renewal(self) -> float:
        return max(0.0, self._renew_at - self._clock())

    def renew_soon(self) -> None:
        """Let the next call of `keep` store the times, since a task was sent that is sent rarely."""
        self._renew_at = float("-inf")

    def keep(self, last_runs: Callable[[], LastRuns]) -> LastRuns | None:
        """Renew the lease, or try to take it, if it is time.

        Args:
            last_runs: returns when this process has sent each task last.

        Returns:
            The last runs of the previous active beat, if this process becomes active; otherwise None.
        """
        if self._clock() < self._renew_at:
            return None
        try:
            if self.is_active:
                self._renew(last_runs(), LEASE_SECONDS)
                return None
            return self._take()
        except django.db.Error as exc:
            log.warning("beat_lease_unreachable", error=str(exc))
            connection.close()  # the next call connects again
            self._renew_at = self._clock() + RETRY_SECONDS
            return None

    def release(self, last_runs: LastRuns) -> None:
        """Store the last runs, and end the lease. Never raises: otherwise the lease expires."""
        try:
            if self.is_active:
                self._renew(last_runs, 0.0)
        except django.db.Error as exc:
            log.warning("beat_lease_unreachable", error=str(exc))
        self._until = float("-inf")
        if self._lock is not None:
            self._lock.close()
            self._lock = self._place = None

    def _take(self) -> LastRuns | None:
        self._find_place()
        started_at = self._clock()
        row = _execute(_TAKE, {"holder": self._holder, "place": self._place, "seconds": LEASE_SECONDS})
        self._renew_at = started_at + RENEW_SECONDS
        if row is None:  # another beat is active
            self._note_loss()
            return None
        self.fencing_number, found = int(row[0]), json.loads(row[1])
        self._is_holder = True
        self._until = started_at + LEASE_SECONDS - MARGIN_SECONDS
        log.info("beat_active", fencing_number=self.fencing_number)
        return {str(name): str(at) for name, at in found.items()}

    def _renew(self, last_runs: LastRuns, seconds: float) -> None:
        started_at = self._clock()
        parameters = {"holder": self._holder, "fencing_number": self.fencing_number, "seconds": seconds}
        row = _execute(_RENEW, parameters | {"last_runs": json.dumps(last_runs)})
        self._renew_at = started_at + RENEW_SECONDS
        if row is None:
            self._until = float("-inf")
            self._note_loss()
        else:
            self._until = started_at + seconds - MARGIN_SECONDS

    def _note_loss(self) -> None:
        """Report once that another beat has taken this process's lease."""
        if self._is_holder:
            log.warning("beat_lease_lost", fencing_number=self.fencing_number)
        self._is_holder = False

    def _find_place(self) -> None:
        """Lock the file of the data directory, if no other process has it."""
        if self._lock is not None:
            return
        try:
            lock = LockFile(self._lock_path)
        except OSError as exc:
            log.warning("beat_lock_failed", error=str(exc))
            return
        if lock.lock():
            self._lock, self._place = lock, lock.identify()
        else:
            lock.close()


def _execute(statement: str, parameters: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Execute a statement in a transaction of its own, and return its row."""
    with all_tenants_scope(BypassReason.HOUSEKEEPING), connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        row: tuple[Any, ...] | None = cursor.fetchone()
        return row
