"""A gateway for test calls: it streams one chat completion, only pings, or rejects the API key."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY, REQUEST_ID = "sk-mr-known", "req_of_the_test_call"
WAITING_MODEL = "waiting"  # its stream has only pings
SECONDS_BETWEEN_TOKENS, SECONDS_BETWEEN_PINGS = 0.05, 0.02


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        is_known = self.headers["authorization"] == f"Bearer {KEY}"
        self.send_response(200 if is_known else 401)
        self.send_header("x-request-id", REQUEST_ID)
        self.end_headers()
        if not is_known:
            self.wfile.write(json.dumps({"error": {"message": "Wrong API key."}}).encode())
            return
        if body["model"] == WAITING_MODEL:
            self._ping_until_closed()
            return
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        for text in ("Hello", "!"):
            self._send({"choices": [{"delta": {"content": text}}]})
            time.sleep(SECONDS_BETWEEN_TOKENS)  # the speed is that between tokens
        self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _ping_until_closed(self) -> None:
        with suppress(OSError):
            while True:
                self.wfile.write(b": ping\n\n")
                time.sleep(SECONDS_BETWEEN_PINGS)

    def _send(self, chunk: object) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def fake_gateway() -> Iterator[str]:
    """Run the gateway until the block ends, and yield its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
