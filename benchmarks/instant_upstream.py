"""An OpenAI-compatible server that responds immediately: the upstream of the gateways that benchmarks.gateway compares,
and the server of `serve --quick`.

It is a raw ASGI application. Chat completions have one part, or eight if they are streamed; completions are a stream of
eight tokens. Messages have the format of Anthropic's API.
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
_MESSAGE = json.dumps(
    {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "bench",
        "content": [{"type": "text", "text": "The answer is always the same."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 40, "output_tokens": 8},
    }
).encode()


def _head(answer: bytes) -> dict[str, Any]:
    return {
        "type": "http.response.start",
        "status": 200,
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode()), *_LIMITS],
    }


_STREAM = b"".join(
    b"data: " + json.dumps(chunk).encode() + b"\n\n"
    for chunk in [
        *({"choices": [{"index": 0, "text": f" {word}"}]} for word in range(_USAGE["completion_tokens"])),
        {"choices": [], "usage": _USAGE},
    ]
)
# The rate limits that providers report with each response.
_LIMITS = [
    (f"x-ratelimit-{part}-{dimension}".encode(), value)
    for dimension in ("requests", "tokens")
    for part, value in (("limit", b"100000000"), ("remaining", b"99999999"), ("reset", b"6ms"))
]
_STREAM_HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), *_LIMITS],
}


_CHAT_STREAM = b"".join(
    b"data: "
    + json.dumps({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, **chunk}).encode()
    + b"\n\n"
    for chunk in [
        *(
            {"choices": [{"index": 0, "delta": {"content": f" {word}"}, "finish_reason": None}]}
            for word in range(_USAGE["completion_tokens"])
        ),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": _USAGE},
    ]
)


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    if scope["path"] == "/v1/chat/completions" and b'"stream":true' in body:
        await send(_STREAM_HEAD)
        await send({"type": "http.response.body", "body": _CHAT_STREAM + b"data: [DONE]\n\n"})
        return
    if scope["path"] == "/v1/completions":
        await send(_STREAM_HEAD)
        await send({"type": "http.response.body", "body": _STREAM, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
        return
    answer = _MESSAGE if scope["path"] == "/v1/messages" else _ANSWER
    await send(_head(answer))
    await send({"type": "http.response.body", "body": answer})
