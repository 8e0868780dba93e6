"""Delivery of outboxes: claim a due row, send it, store the result. Concurrent senders share the work.

An outbox is a model with the columns of `OutboxRow` and a subclass of `Outbox`, registered by name. Delivery is at
least once: if a sender is killed, its lease ends and another sender sends the row again. After the last attempt a row
has the state `failed` and stays in its table, also if each of its senders was killed or raised an error.

The outboxes have separate tables: webhook deliveries belong to endpoints and have a log of attempts, invoice emails are
stored as long as their invoices, and emails are deleted after 90 days.
"""

from __future__ import annotations

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import redis
import structlog
from django.conf import settings
from django.db import connection
from django.db.models import Min

from inference_worker.contract import valkey
from inference_worker.contract.texts import Text
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import OutboxRow
from tenants.outbox.totals import TOTALS_KEY, total_field

log = structlog.get_logger(__name__)

INTERNAL_ERROR = Text("The message could not be sent because of an internal error.")

# The conditions are constants of the outboxes.
_CLAIM = """
UPDATE {table} SET leased_until = %(until)s, next_attempt_at = %(until)s, attempt_count = attempt_count + 1
WHERE id = (
    SELECT d.id FROM {table} d WHERE d.state = %(waiting)s AND d.next_attempt_at <= %(now)s AND {condition}
    ORDER BY d.next_attempt_at, d.id LIMIT 1 FOR UPDATE SKIP LOCKED
) RETURNING id
"""


class AttemptResult(Protocol):
    """The result of an attempt. `error` is the message for the tenant; it is empty after a success."""

    @property
    def is_success(self) -> bool: ...

    @property
    def error(self) -> str: ...


R = TypeVar("R", bound=OutboxRow)
A = TypeVar("A", bound=AttemptResult)


class Outbox(Generic[R, A]):
    """One kind of messages: its table, its schedule of attempts, and how a message is sent."""

    name: ClassVar[str]
    reason: ClassVar[BypassReason]
    model: ClassVar[type[OutboxRow]]
    waiting: ClassVar[str]  # values of the column `state`
    sent: ClassVar[str]
    failed: ClassVar[str] = "failed"
    retry_seconds: ClassVar[tuple[int, ...]]  # after each attempt but the last
    jitter: ClassVar[float] = 0.0  # share of each delay, so that simultaneous failures are not retried simultaneously
    lease: ClassVar[timedelta]  # longer than an attempt
    claim_condition: ClassVar[str] = "true"  # SQL for the row `d`
    claim_lock: ClassVar[int | None] = None  # the number of an advisory lock: one claim at a time
    related: ClassVar[tuple[str, ...]] = ()  # for select_related

    def attempt(self, row: R) -> A:
        """Send the message, outside of a transaction."""
        raise NotImplementedError

    def failure(self, error: str) -> A:
        """Return the result of an attempt that had none of its own."""
        raise NotImplementedError

    def lock_parent(self, row: R) -> bool:
        """Lock a row that must be locked before the message. Return False if it was deleted."""
        return True

    def is_final(self, row: R, result: A) -> bool:
        """Return whether further attempts of a failed message are useless."""
        return False

    def store(self, row: R, current: R, result: A, now: datetime) -> None:
        """Store more of the result, in the transaction of the new state. `row` was claimed; `current` is locked."""

    def after(self, row: R, result: A, outcome: str) -> None:
        """Act on a stored result, after its transaction."""

    def senders_wanted(self) -> int:
        """Return the number of concurrent senders with work."""
        return 1

    def seconds_until_due(self) -> float | None:
        """Return in how many seconds the next message is due, or None. It may have to wait for others."""
        with all_tenants_scope(self.reason):
            next_at = self._rows().filter(state=self.waiting).aggregate(at=Min("next_attempt_at"))["at"]
        return None if next_at is None else max(0.0, (next_at - datetime.now(UTC)).total_seconds())

    def send_due(self, now: datetime | None = None) -> Counter[str]:
        """Send all due messages, one after another. Return the number of attempts by outcome."""
        outcomes: Counter[str] = Counter()
        try:
            while (row := self.claim(now or datetime.now(UTC))) is not None:
                result = self._attempt(row)
                if not result.is_success:
                    log.warning("outbox_attempt_failed", outbox=self.name, row=row.pk, error=result.error)
                outcome = self.record(row, result, now or datetime.now(UTC))
                if outcome:
                    outcomes[outcome] += 1
                    self.after(row, result, outcome)
        finally:
            release_connection()
            _count(self.name, outcomes)
        return outcomes

    def _attempt(self, row: R) -> A:
        if row.attempt_count > len(self.retry_seconds) + 1:  # the sender of the last attempt was killed
            return self.failure(INTERNAL_ERROR)
        try:
            return self.attempt(row)
        except Exception:  # one message must not keep those behind it from being sent
            log.exception("outbox_attempt_raised", outbox=self.name, row=row.pk)
            return self.failure(INTERNAL_ERROR)

    def claim(self, now: datetime) -> R | None:
        """Lease a due row."""
        table = self.model._meta.db_table
        values: dict[str, Any] = {"now": now, "until": now + self.lease, "waiting": self.waiting}
        with all_tenants_scope(self.reason), connection.cursor() as cursor:
            if self.claim_lock is not None:
                cursor.execute("SELECT pg_advisory_xact_lock(%s)", [self.claim_lock])
            cursor.execute(_CLAIM.format(table=table, condition=self.claim_condition), values)
            found = cursor.fetchone()
            return None if found is None else self._rows().select_related(*self.related or (None,)).get(pk=found[0])

    def record(self, row: R, result: A, now: datetime) -> str:
        """Store the result. Return its outcome: `sent`, `retried`, `failed` or, if the row was deleted, an empty text.

        A sender that has lost its lease changes the state only if it was successful.
        """
        with all_tenants_scope(self.reason):
            if not self.lock_parent(row):
                return ""
            current: R | None = self._rows().select_for_update(no_key=True).filter(pk=row.pk).first()
            if current is None:
                return ""
            outcome = "retried"
            if result.is_success:
                outcome, current.state, current.leased_until = "sent", self.sent, None  # type: ignore[attr-defined]
            elif current.state == self.waiting and current.leased_until == row.leased_until:  # type: ignore[attr-defined]
                outcome = self.postpone(current, now, is_final=self.is_final(row, result))
            current.save(update_fields=["state", "next_attempt_at", "leased_until"])
            self.store(row, current, result, now)
        return outcome

    def postpone(self, row: R, now: datetime, *, is_final: bool) -> str:
        """Set the time of the next attempt, or the state `failed`. Returns the outcome."""
        row.leased_until = None
        if is_final or row.attempt_count > len(self.retry_seconds):
            row.state = self.failed  # type: ignore[attr-defined]
            return "failed"
        jitter = 1 + self.jitter * random.uniform(-1, 1)  # noqa: S311  (not a secret)
        row.next_attempt_at = now + timedelta(seconds=self.retry_seconds[row.attempt_count - 1] * jitter)
        return "retried"

    def _rows(self) -> Any:
        return self.model.objects.all_tenants()


OUTBOXES: dict[str, Outbox[Any, Any]] = {}


def register(outbox: Outbox[R, A]) -> None:
    """Make an outbox known to `deliver`."""
    OUTBOXES[outbox.name] = outbox


def seconds_until_message(name: str) -> float | None:
    """Return in how many seconds a message of an outbox is due, or None if no message waits."""
    return OUTBOXES[name].seconds_until_due()


def deliver(name: str) -> int:
    """Send the due messages of an outbox with several senders. Return the number of attempts."""
    outbox = OUTBOXES[name]
    senders = outbox.senders_wanted()
    if senders <= 1:
        return outbox.send_due().total() if senders else 0
    with ThreadPoolExecutor(senders, name) as pool:
        return sum(outcomes.total() for outcomes in pool.map(lambda _: outbox.send_due(), range(senders)))


def release_connection() -> None:
    """Return the database connection to its pool while a sender waits for another server."""
    if not connection.in_atomic_block:
        connection.close()


def _count(name: str, outcomes: Counter[str]) -> None:
    """Add to the totals in Valkey, which gateways report as metrics."""
    if not outcomes:
        return
    try:
        with valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker, broker.pipeline() as pipe:
            for outcome, count in outcomes.items():
                pipe.hincrby(TOTALS_KEY, total_field(name, outcome), count)
            pipe.execute()
    except redis.RedisError as exc:
        log.warning("outbox_totals_failed", outbox=name, error=str(exc))
