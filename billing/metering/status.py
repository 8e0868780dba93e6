"""What the settler says of itself in the broker, for metrics and the console. Free of Django."""

from __future__ import annotations

import msgspec

STATUS_KEY = "millrace:settler:status"  # SettlerStatus as msgpack; with several settlers, of the one that reported last
TOTALS_KEY = "millrace:settler:totals"  # a hash of counters over all settlers; a crash may leave its last batch out


class SettlerStatus(msgspec.Struct, frozen=True):
    """How settling goes. Written once a second and after each batch: an old `at` means that no settler runs."""

    at: int  # microseconds since 1970, UTC, by the broker's clock, as are all times here
    consumer: str
    settled: int  # events that became rows
    repeated: int  # events that were rows already
    quarantined: int
    last_batch_at: int | None
    backlog: int  # messages not yet settled
    lag_ms: int  # age of the oldest of them


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(SettlerStatus).decode
