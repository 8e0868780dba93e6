"""Live demo requests: concurrent chat completions over HTTP with the demo keys."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import httpx2

from millrace.demo.seeding import DemoModels, DemoTenant, Secrets
from millrace.demo.tenants import TenantSpec

MAX_CONCURRENT_REQUESTS = 4
MAX_TOKENS = 48
ANSWER_SECONDS = 120
REJECTED_PAUSE = 0.5  # seconds that a rejected client waits


class GatewayUnreachable(Exception):
    """Raised if the gateway cannot be reached."""


@dataclass
class LiveResult:
    """The results of the requests so far."""

    statuses: Counter[int] = field(default_factory=Counter)
    tokens: int = 0

    @property
    def requests(self) -> int:
        return sum(self.statuses.values())


@dataclass(frozen=True)
class _LiveKey:
    """A key and the model that it uses."""

    tenant: TenantSpec
    secret: str
    model: str


def send_requests(
    demo_tenants: Sequence[DemoTenant],
    secrets: Secrets,
    models: DemoModels,
    url: str,
    *,
    seconds: float,
    max_requests: int,
    on_progress: Callable[[LiveResult], None],
) -> LiveResult:
    """Send requests for a number of seconds, up to a maximum count.

    Raises:
        GatewayUnreachable: the gateway cannot be reached at the URL.
    """
    lines = [line for demo_tenant in demo_tenants for line in _lines(demo_tenant, secrets, models)]
    result, lock = LiveResult(), threading.Lock()
    numbers, deadline = itertools.count(), time.monotonic() + seconds

    def work() -> None:
        while time.monotonic() < deadline and lines:
            with lock:
                number = next(numbers)
            if number >= max_requests:
                return
            status, tokens = _request(client, lines[number % len(lines)], number)
            with lock:
                result.statuses[status] += 1
                result.tokens += tokens
                on_progress(result)
            if status != HTTPStatus.OK:
                time.sleep(REJECTED_PAUSE)

    with (
        httpx2.Client(base_url=url, timeout=ANSWER_SECONDS, trust_env=False) as client,  # without a proxy
        ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool,
    ):
        _check_gateway(client)
        for future in [pool.submit(work) for _ in range(MAX_CONCURRENT_REQUESTS)]:
            future.result()
    return result


def _lines(demo_tenant: DemoTenant, secrets: Secrets, models: DemoModels) -> list[_LiveKey]:
    found = []
    for key in demo_tenant.spec.keys:
        secret = secrets.get(demo_tenant, key.name)
        model = key.work and models.find_model(key.work.model)
        if secret and model and key.work and key.work.model != "embedding":
            found.append(_LiveKey(demo_tenant.spec, secret, model))
    return found


def _check_gateway(client: httpx2.Client) -> None:
    try:
        client.get("/readyz")
    except httpx2.TransportError as exc:
        raise GatewayUnreachable(f"cannot connect to {str(client.base_url).rstrip('/')}: {exc}") from exc


def _request(client: httpx2.Client, line: _LiveKey, number: int) -> tuple[int, int]:
    """Return the response's status and its number of tokens, or (0, 0) without a response."""
    questions = line.tenant.questions
    body = {
        "model": line.model,
        "max_tokens": MAX_TOKENS,
        "messages": [
            {"role": "system", "content": line.tenant.instructions},
            {"role": "user", "content": questions[number // 3 % len(questions)]},
        ],
    }
    try:
        response = client.post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {line.secret}"})
        content: dict[str, Any] = response.json()
    except (httpx2.TransportError, ValueError):
        return 0, 0
    return response.status_code, content.get("usage", {}).get("total_tokens", 0)
