"""Asks the running platform, as a customer would: chat completions over HTTP with the demo keys, several at once."""

from __future__ import annotations

import http.client
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from millrace.devserver.demo.prompts import INSTRUCTIONS, QUESTIONS
from millrace.devserver.demo.seeding import DemoModels, DemoTenant, Secrets

MAX_CONCURRENT_REQUESTS = 4
MAX_TOKENS = 48
ANSWER_SECONDS = 120
REFUSED_PAUSE = 0.5  # a refused client waits a little, as a customer's client does


class NobodyAnswers(Exception):
    """The gateway cannot be reached."""


@dataclass
class LiveResult:
    """What became of the requests so far."""

    statuses: Counter[int] = field(default_factory=Counter)
    tokens: int = 0

    @property
    def requests(self) -> int:
        return sum(self.statuses.values())


@dataclass(frozen=True)
class _Line:
    """A key and the model it asks."""

    slug: str
    secret: str
    model: str


def ask(
    players: Sequence[DemoTenant],
    secrets: Secrets,
    models: DemoModels,
    url: str,
    *,
    seconds: float,
    most: int,
    tell: Callable[[LiveResult], None],
) -> LiveResult:
    """Send requests for a number of seconds, up to a maximum count.

    Raises:
        NobodyAnswers: nothing serves at the URL.
    """
    lines = [line for player in players for line in _lines(player, secrets, models)]
    _see(url)
    asked, lock = LiveResult(), threading.Lock()
    numbers, ends = itertools.count(), time.monotonic() + seconds

    def work() -> None:
        while time.monotonic() < ends and lines:
            with lock:
                number = next(numbers)
            if number >= most:
                return
            status, tokens = _request(url, lines[number % len(lines)], number)
            with lock:
                asked.statuses[status] += 1
                asked.tokens += tokens
                tell(asked)
            if status != http.client.OK:
                time.sleep(REFUSED_PAUSE)

    with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
        for future in [pool.submit(work) for _ in range(MAX_CONCURRENT_REQUESTS)]:
            future.result()
    return asked


def _lines(player: DemoTenant, secrets: Secrets, models: DemoModels) -> list[_Line]:
    found = []
    for key in player.spec.keys:
        secret = secrets.get(player, key.name)
        model = key.work and models.named(key.work.model)
        if secret and model and key.work and key.work.model != "embedding":
            found.append(_Line(player.spec.slug, secret, model))
    return found


def _see(url: str) -> None:
    try:
        connection = _connect(url)
        connection.request("GET", "/readyz")
        connection.getresponse().read()
        connection.close()
    except (OSError, http.client.HTTPException) as exc:
        raise NobodyAnswers(f"nothing answers at {url}: {exc}") from exc


def _request(url: str, line: _Line, number: int) -> tuple[int, int]:
    """Return the answer's status and how many tokens it used; the status 0 for none."""
    questions = QUESTIONS[line.slug]
    body = {
        "model": line.model,
        "max_tokens": MAX_TOKENS,
        "messages": [
            {"role": "system", "content": INSTRUCTIONS[line.slug]},
            {"role": "user", "content": questions[number // 3 % len(questions)]},
        ],
    }
    headers = {"Authorization": f"Bearer {line.secret}", "Content-Type": "application/json"}
    connection = _connect(url)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        content: dict[str, Any] = json.loads(answer.read())
    except (OSError, http.client.HTTPException, ValueError):
        return 0, 0
    finally:
        connection.close()
    return answer.status, content.get("usage", {}).get("total_tokens", 0)


def _connect(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=ANSWER_SECONDS)
