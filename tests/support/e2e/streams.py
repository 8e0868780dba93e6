"""Chat streams of a running platform, read event by event."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec

from tests.support.stack import MODEL, Stack

BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me a very long story."}],
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
    "temperature": 0,
}


class Stream:
    """A chat stream read event by event, as a browser's EventSource would."""

    def __init__(self, stack: Stack, *, max_tokens: int = 120, **headers: str) -> None:
        self._client = httpx2.Client(timeout=300)
        request = self._client.build_request(
            "POST",
            f"{stack.url}/v1/chat/completions",
            json={**BODY, "max_tokens": max_tokens},
            headers={**stack.headers, **headers},
        )
        give_up_at = time.monotonic() + 60
        while True:
            self.response = self._client.send(request, stream=True)
            if self.response.status_code != 503 or time.monotonic() > give_up_at:
                break
            self.response.close()  # a busy machine: retry after the time in the response
            time.sleep(float(self.response.headers["retry-after"]))
        assert self.response.status_code == 200, self.response.read()
        self.request_id = self.response.headers["x-request-id"]
        self._events = sse_events(self.response)
        self.ids: list[str] = []
        self.datas: list[str] = []

    def read(self, count: int = 10**9) -> None:
        for _ in range(count):
            event = next(self._events, None)
            if event is None:
                return
            self.ids.append(event[0])
            self.datas.append(event[1])

    def close(self) -> None:
        self.response.close()
        self._client.close()


def sse_events(response: httpx2.Response) -> Iterator[tuple[str, str]]:
    event_id = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            yield event_id, line.removeprefix("data: ")


def usage_of(datas: list[str]) -> dict[str, Any]:
    assert datas[-1] == "[DONE]"
    usage = msgspec.json.decode(datas[-2])["usage"]
    return dict(usage)
