"""An OpenAI-compatible server that answers at once: what stands behind the peer. Raw ASGI, nothing else."""

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


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    await send(_HEAD)
    await send({"type": "http.response.body", "body": _ANSWER})
