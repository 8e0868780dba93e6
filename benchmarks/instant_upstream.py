"""An OpenAI-compatible server that responds immediately: LiteLLM's upstream, and the server of `serve --quick`.

It is a raw ASGI application. Chat completions have one part, completions are a stream of eight tokens.
"""

from __future__ import annotations

import json
from typing import Any

_USAGE = {"prompt_tokens": 40, "completion_tokens": 8, "total_tokens": 48}
_ANSWER = json.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "bench",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "The answer is always the same."},
                "finish_reason": "stop",
            }
        ],
        "usage": _USAGE,
    }
).encode()
_HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(_ANSWER)).encode())],
}


_STREAM = b"".join(
    b"data: " + json.dumps(chunk).encode() + b"\n\n"
    for chunk in [
        *({"choices": [{"index": 0, "text": f" {word}"}]} for word in range(_USAGE["completion_tokens"])),
        {"choices": [], "usage": _USAGE},
    ]
)
_STREAM_HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream")],
}


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    if scope["path"] == "/v1/completions":
        await send(_STREAM_HEAD)
        await send({"type": "http.response.body", "body": _STREAM, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        return
    await send(_HEAD)
    await send({"type": "http.response.body", "body": _ANSWER})
