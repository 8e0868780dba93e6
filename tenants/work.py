"""Announcements of stored work, so that beat sends the task for it without frequent queries.

Beat checks rarely whether a task has work while there is none (millrace.conf.scheduler). A lost announcement delays the
task until the next check.
"""

from __future__ import annotations

import redis
import structlog
from django.conf import settings
from django.db import transaction

from inference_worker.contract import valkey
from inference_worker.contract.messages import WORK_CHANNEL

log = structlog.get_logger(__name__)


def announce_work() -> None:
    """Announce work after the commit of the current transaction, or immediately if there is none."""
    transaction.on_commit(publish_announcement)


def publish_announcement() -> None:
    """Make beat check its tasks now."""
    try:
        with valkey.connect(settings.MILLRACE.valkey_url, valkey.NOTIFICATIONS) as broker:
            broker.publish(WORK_CHANNEL, "")
    except redis.RedisError as exc:
        log.warning("work_announcement_failed", error=str(exc))


class WorkListener:
    """A subscription to announcements. It connects when it first waits, and again after an error."""

    def __init__(self) -> None:
        self._messages: redis.client.PubSub | None = None

    def wait(self, seconds: float) -> bool:
        """Wait until work is announced, at most `seconds`. Return whether work may have been announced.

        Raises:
            redis.RedisError: Valkey cannot be reached.
        """
        messages, self._messages = self._messages, None
        if messages is None:
            messages = valkey.connect(settings.MILLRACE.valkey_url, valkey.WORK).pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
            messages.subscribe(WORK_CHANNEL)
            is_announced = True  # perhaps before the subscription
        else:
            is_announced = messages.get_message(timeout=seconds) is not None
        self._messages = messages
        return is_announced
