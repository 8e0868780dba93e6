"""Journals of workers that do not run: a worker settles those in its directory whose lock no process holds.

They remain after a worker was renamed, or its model removed. Such a journal is locked only for the moments of a step,
so a worker that returns under its name waits for at most one step (Journal's `wait_seconds`).
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import redis
import structlog

from inference_worker.contract import valkey
from inference_worker.contract.exits import report_stored_exit
from inference_worker.contract.journal import Journal, JournalBusyError
from inference_worker.worker.journal_replay import JournalReplay
from inference_worker.worker.periodic_thread import PeriodicThread

log = structlog.get_logger(__name__)

STEP_SECONDS = 10.0
RETAINED_STEP_SECONDS = 60.0  # for a journal without unsettled events, which is kept for the retention time


class OrphanedJournals:
    """The thread that settles the orphaned journals of one directory."""

    def __init__(
        self, valkey_url: str, own: Path, retention_seconds: int, *, journal_retention_seconds: int = 0
    ) -> None:
        """
        Args:
            own: directory of this worker's journal. The others are beside it.
            retention_seconds: how long event logs are kept.
            journal_retention_seconds: how long settled events are kept.
        """
        self._broker = valkey.connect(valkey_url, valkey.SUPERVISOR)
        self._own = own
        self._retention_seconds = retention_seconds
        self._journal_retention_seconds = journal_retention_seconds
        self._replays: dict[Path, JournalReplay] = {}
        self._unreadable: set[Path] = set()  # journals that another version wrote, or that are damaged
        self._next_steps: dict[Path, float] = {}  # monotonic times, of journals without unsettled events
        self._thread = PeriodicThread("orphaned-journals", self.step, STEP_SECONDS)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._thread.close()
        self._broker.close()

    def step(self) -> None:
        """Send what the orphaned journals have. Delete those whose events were settled before the retention time."""
        for directory in sorted(path.parent for path in self._own.parent.glob("*/lock")):
            if directory == self._own or directory in self._unreadable or not any(directory.glob("*.journal")):
                continue
            if time.monotonic() < self._next_steps.get(directory, 0.0):
                continue
            try:
                journal = Journal(directory, retention_seconds=self._journal_retention_seconds)
            except JournalBusyError:
                continue
            except OSError as exc:  # the other journals must not be affected
                log.warning("journal_unavailable", journal=directory.name, error=str(exc))
                continue
            except (ValueError, msgspec.MsgspecError) as exc:
                log.error("journal_unreadable", journal=directory.name, error=str(exc))
                self._unreadable.add(directory)
                continue
            try:
                self._settle(directory, journal)
            except OSError as exc:
                log.warning("journal_unavailable", journal=directory.name, error=str(exc))
            finally:
                journal.close()

    def _settle(self, directory: Path, journal: Journal) -> None:
        report_stored_exit(self._broker, directory)
        replay = self._replays.get(directory)
        if replay is None:
            log.info("orphaned_journal_found", journal=directory.name, events=len(journal.open_events()))
            replay = self._replays[directory] = JournalReplay(self._broker, journal, self._retention_seconds)
        replay.journal = journal
        try:
            replay.fail_unsent()
            replay.resend()
            replay.remove_settled()
            while replay.send_lost():
                pass
        except (redis.RedisError, OSError):
            del self._replays[directory]  # the next step reads the journal again
            raise
        if not journal.has_retained_events:
            journal.delete_segments()
            del self._replays[directory]
            self._next_steps.pop(directory, None)
            log.info("orphaned_journal_settled", journal=directory.name)
        elif not journal.open_events():
            self._next_steps[directory] = time.monotonic() + RETAINED_STEP_SECONDS
