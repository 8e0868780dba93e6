"""Server-sent events, parsed from a stream of bytes."""

from __future__ import annotations

from inference_worker.worker.relay.failures import UpstreamFailed, make_upstream_failure

MAX_EVENT_BYTES = 8 * 2**20


def _too_large() -> UpstreamFailed:
    return make_upstream_failure("The model's provider sent an event that is too large.")


class EventParser:
    """A parser of one stream. It returns the data of each event; names are repeated in the data of all upstreams."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []  # the start of a line, in the parts that arrived
        self._data: list[bytes] = []  # data lines of the current event
        self._size = 0  # bytes of the buffer and the data lines

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that `data` completes.

        Raises:
            UpstreamFailed: an event is too large.
        """
        if b"\n" not in data:  # NOTE: not joined yet, so that a line in many small parts takes linear time
            self._pending.append(data)
            self._size += len(data)
            if self._size > MAX_EVENT_BYTES:
                raise _too_large()
            return []
        self._size -= sum(map(len, self._pending))
        lines = b"".join((*self._pending, data)).split(b"\n")
        self._pending = [lines.pop()]
        events: list[bytes] = []
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data:"):
                value = line[5:].removeprefix(b" ")
                self._data.append(value)
                self._size += len(value) + 1
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data, self._size = [], 0
            if self._size > MAX_EVENT_BYTES:
                raise _too_large()
        self._size += len(self._pending[0])
        if self._size > MAX_EVENT_BYTES:
            raise _too_large()
        return events

    def close(self) -> list[bytes]:
        """Return the event that the end of the stream completes, if any."""
        return self.feed(b"\n\n")
