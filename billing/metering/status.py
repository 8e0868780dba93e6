"""The settler's status in the broker, for metrics and the console. Does not import Django."""

from __future__ import annotations

import msgspec

STATUS_KEY = "millrace:settler:status"  # SettlerStatus as msgpack, of the settler that reported last
TOTALS_KEY = "millrace:settler:totals"  # a hash of counters of all settlers; a crash may lose its last batch


class SettlerStatus(msgspec.Struct, frozen=True):
    """The settler's status, written once a second. If `at` is old, no settler runs."""

    at: int  # microseconds since 1970, UTC, by the broker's clock, as are all times here
    consumer: str
    settled: int  # new events
    repeated: int  # events that had a row
    quarantined: int
    backlog: int  # messages not yet settled
    lag_ms: int  # age of the oldest of them


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(SettlerStatus).decode
