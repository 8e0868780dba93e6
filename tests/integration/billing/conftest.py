"""The settler's connection to Valkey, and Stripe's API."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import pytest
import redis

if TYPE_CHECKING:
    from tests.support.billing.fake_stripe import FakeStripe


@pytest.fixture
def broker(settler_broker: redis.Redis) -> redis.Redis:
    return settler_broker


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are received months after the documents."""
    from tests.support.billing.clocks import receive_requests_late

    receive_requests_late(monkeypatch)


@pytest.fixture
def fake_stripe(settings: Any) -> Iterator[FakeStripe]:
    """A server with Stripe's API, which the platform is configured for."""
    from tests.support.billing.fake_stripe import FakeStripe

    found = FakeStripe()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"])).decode()
            fields = {name: values[0] for name, values in parse_qs(text).items()}
            status, body = found.answer(self.path, fields, self.headers)
            if found.is_lost:
                self.connection.close()
                return
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    settings.MILLRACE = replace(settings.MILLRACE, stripe_api_key="sk_test_1", stripe_api_url=url)
    yield found
    server.shutdown()
    server.server_close()
