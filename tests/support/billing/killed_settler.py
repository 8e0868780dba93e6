"""A settler killed by SIGKILL when it reaches a step the n-th time.

Run: `python -m tests.support.billing.killed_settler STEP N`.

Only this process is patched; the product has no code for it.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from typing import Any

import django

STEPS = {
    "read": ("billing.metering.settler.settle", "before"),
    "stamped": ("billing.metering.ingest.stamps", "after"),
    "inserted": ("billing.reservations.reservations.settle", "before"),
    "moved": ("billing.reservations.reservations.settle", "after"),
    "charged late": ("billing.reservations.reservations.adjust", "after"),
    "booked": ("billing.metering.cost_booking.book", "after"),
    "committed": ("billing.metering.ingest._store", "after"),
    "adjusted": ("billing.metering.duplicate_events.write_adjustment", "after"),
    "merged": ("billing.metering.ingest._merge_repeated", "after"),
    "put into quarantine": ("billing.metering.ingest._quarantine", "after"),
    "settled": ("billing.metering.settler.Settler._acknowledge", "before"),
    "acknowledged": ("billing.metering.settler.Settler._acknowledge", "after"),
}


def main() -> None:
    django.setup()
    from django.utils.module_loading import import_string

    from billing.metering.settler import Settler
    from inference_worker.contract import valkey
    from millrace.environment.configuration import platform_settings

    step, time = sys.argv[1], int(sys.argv[2])
    path, when = STEPS[step]
    owner, _, name = path.rpartition(".")
    place: Any = sys.modules.get(owner) or import_string(owner)
    real, count = getattr(place, name), itertools.count(1)

    def die_in_time() -> None:
        if next(count) == time:
            os.kill(os.getpid(), signal.SIGKILL)

    def deadly(*arguments: Any, **named: Any) -> Any:
        if when == "before":
            die_in_time()
        result = real(*arguments, **named)
        if when == "after":
            die_in_time()
        return result

    setattr(place, name, deadly)
    Settler(
        valkey.connect(platform_settings().valkey_url, valkey.SETTLER), consumer="a", stopping=threading.Event()
    ).drain()


if __name__ == "__main__":
    main()
