"""A small OpenAI-compatible server, which tests run as a managed engine: `child_server.py PORT [OPTION…]`.

Requests without the key of CHILD_API_KEY get 401. Options: `fork` starts a process in a session of its own that
outlives the server and ignores SIGTERM; `deaf` ignores SIGTERM; `slow` is healthy only after a second; `dies` ends
after the start with status 3. A prompt `crash` ends the server after the first token, `stuck` stops it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

OPTIONS = sys.argv[2:]
STARTED = time.monotonic()
SLEEPER = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        is_ready = "slow" not in OPTIONS or time.monotonic() - STARTED > 1
        self._respond(200 if is_ready and self.path in ("/v1/models", "/health") else 503, b"{}", "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.headers["authorization"] != f"Bearer {os.environ['CHILD_API_KEY']}":
            self._respond(401, b"{}", "application/json")
            return
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        text = json.dumps(dict(os.environ)) if prompt == "environment" else "from the child"
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, **({"delta": {"content": text}} if "messages" in body else {"text": text})}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}},
        ]
        events = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks]
        if prompt in ("crash", "stuck"):
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(events[0]), events[0]))
            self.wfile.flush()
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL if prompt == "crash" else signal.SIGSTOP)
        self._respond(200, b"".join(events) + b"data: [DONE]\n\n", "text/event-stream")

    def _respond(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log(format % args)


def log(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    if "deaf" in OPTIONS:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "fork" in OPTIONS:
        sleeper = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
        log(f"sleeper {sleeper.pid}")
    if "dies" in OPTIONS:
        sys.exit(3)
    log(f"listening {os.getpid()}")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
