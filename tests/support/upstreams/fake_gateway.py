"""A gateway for test calls: it streams one chat completion, or rejects the API key."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY, REQUEST_ID = "sk-mr-known", "req_of_the_test_call"
SECONDS_BETWEEN_TOKENS = 0.05


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        is_known = self.headers["authorization"] == f"Bearer {KEY}"
        self.send_response(200 if is_known else 401)
        self.send_header("x-request-id", REQUEST_ID)
        self.end_headers()
        if not is_known:
            self.wfile.write(json.dumps({"error": {"message": "Wrong API key."}}).encode())
            return
        usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
        for text in ("Hello", "!"):
            self._send({"choices": [{"delta": {"content": text}}]})
            time.sleep(SECONDS_BETWEEN_TOKENS)  # the speed is that between tokens
        self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, chunk: object) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def fake_gateway() -> Iterator[str]:
    """Run the gateway until the block ends, and yield its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
