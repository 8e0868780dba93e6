"""A server that receives webhooks, verifies their signatures and handles each event once."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

TOLERANCE_SECONDS = 300
MAX_BODY_BYTES = 1 << 20


def is_genuine(secret: str, event_id: str, timestamp: str, signatures: str, body: bytes) -> bool:
    """Return whether the event was signed with the secret in the last five minutes (Standard Webhooks)."""
    if not timestamp.isdigit() or abs(time.time() - int(timestamp)) > TOLERANCE_SECONDS:
        return False
    signed = f"{event_id}.{timestamp}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    expected = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
    given = [signature.removeprefix("v1,") for signature in signatures.split()]
    return any(hmac.compare_digest(expected, signature) for signature in given)


class Receiver(BaseHTTPRequestHandler):
    """Answers 204 to genuine events, and 401 to all others."""

    handled: ClassVar[set[str]] = set()  # a real receiver stores the IDs, because an event can arrive twice

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        body = self.rfile.read(length) if length <= MAX_BODY_BYTES else b""
        event_id, timestamp = self.headers.get("webhook-id", ""), self.headers.get("webhook-timestamp", "")
        signatures = self.headers.get("webhook-signature", "")
        genuine = is_genuine(os.environ["WEBHOOK_SECRET"], event_id, timestamp, signatures, body)
        if genuine and event_id not in self.handled:
            self.handled.add(event_id)
            self.handle_event(json.loads(body))
        self.send_response(204 if genuine else 401)
        self.end_headers()

    def handle_event(self, event: dict[str, Any]) -> None:
        """Handle an event. Ignore unknown types: new ones can be added."""
        if event["type"] == "budget.threshold_reached":
            print(f"budget at {event['data'].get('percent')} %")
        else:
            print(event["type"])

    def log_message(self, *_: object) -> None:
        """Do not log each request."""


def main() -> None:
    """Serve on port 9000. Create the endpoint with POST /api/webhooks; the response contains its secret."""
    ThreadingHTTPServer(("127.0.0.1", 9000), Receiver).serve_forever()


if __name__ == "__main__":
    main()
