"""The stored messages of a request, and the request as a curl command."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from django.conf import settings
from django.utils.translation import gettext as _

from millrace.apps.request_log.models import RequestContent, RequestRecord
from millrace.apps.request_log.stored_prompts import decode_body

MAX_MESSAGES = 200
_FOLD_AFTER = 1500  # characters of a message that are shown unfolded
_PATHS = {
    "chat.completions": "/chat/completions",
    "completions": "/completions",
    "responses": "/responses",
    "messages": "/messages",
    "embeddings": "/embeddings",
    "rerank": "/rerank",
    "score": "/score",
}


@dataclass(frozen=True)
class StoredMessage:
    """A message of the prompt, or a completion."""

    role: str
    text: str

    @property
    def is_long(self) -> bool:
        return len(self.text) > _FOLD_AFTER

    @property
    def beginning(self) -> str:
        return self.text[:80]


def body_of(content: RequestContent | None) -> Mapping[str, Any]:
    """Return the stored JSON body; empty if it was not stored or was truncated."""
    return {} if content is None else decode_body(content.body) or {}


def indented_body(content: RequestContent) -> str:
    """Return the stored body with a line for each value; as it was sent if it is not JSON or too deeply nested."""
    body = decode_body(content.body)
    try:
        return content.body if body is None else json.dumps(body, indent=2, ensure_ascii=False)
    except RecursionError:
        return content.body


def messages_of(content: RequestContent | None) -> list[StoredMessage]:
    """Return the conversation, oldest first, at most MAX_MESSAGES of the prompt, and the completions."""
    if content is None:
        return []
    answers = (StoredMessage(_("Assistant"), str(answer)) for answer in content.answers)
    return [*prompt_messages(body_of(content)), *answers]


def prompt_messages(body: Mapping[str, Any]) -> list[StoredMessage]:
    """Return the messages of a prompt, oldest first, at most MAX_MESSAGES and the system prompt."""
    given = body.get("messages", body.get("input", body.get("prompt", ())))
    rows: list[Any] = given if isinstance(given, list) else [given] if given else []
    found = []
    if body.get("system") or body.get("instructions"):
        found.append(StoredMessage(_("System"), _text(body.get("system") or body.get("instructions"))))
    for row in rows[-MAX_MESSAGES:]:
        if isinstance(row, dict) and "role" in row:
            calls = [_call(call) for call in row.get("tool_calls") or () if isinstance(call, dict)]
            text = "\n".join(part for part in (_text(row.get("content")), *calls) if part)
            found.append(StoredMessage(str(row["role"])[:40].capitalize(), text))
        else:
            found.append(StoredMessage(_("User"), _text(row)))
    return found


def _text(content: Any) -> str:
    """Return the text of a message's content. Parts that are not text are named."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_text(part) for part in content)
    if isinstance(content, dict):
        if isinstance(content.get("text"), str):
            return str(content["text"])
        return f"[{content.get('type', 'object')}]"
    return json.dumps(content, ensure_ascii=False)


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    named = function if isinstance(function, dict) else call
    return _("Tool call: %(name)s(%(arguments)s)") % {
        "name": named.get("name", ""),
        "arguments": named.get("arguments", ""),
    }


def curl_of(record: RequestRecord, content: RequestContent | None) -> str:
    """Return the request as a curl command; empty for an endpoint without a path. The key is a variable.

    Without a stored body, the command has the model and max_tokens, and the message is a placeholder.
    """
    path = _PATHS.get(record.endpoint)
    if path is None:
        return ""
    if content is not None and body_of(content):
        text = indented_body(content)
    else:
        text = json.dumps(_skeleton(record), indent=2, ensure_ascii=False)
    quoted = text.replace("'", "'\\''")
    key = "x-api-key: " if record.endpoint == "messages" else "Authorization: Bearer "
    more = ' \\\n  -H "anthropic-version: 2023-06-01"' if record.endpoint == "messages" else ""
    return (
        f"curl {settings.MILLRACE.base_url}/v1{path} \\\n"
        f'  -H "{key}$MILLRACE_API_KEY"{more} \\\n  -H "Content-Type: application/json" \\\n  -d \'{quoted}\''
    )


def _skeleton(record: RequestRecord) -> dict[str, Any]:
    body: dict[str, Any] = {"model": record.requested_model}
    if record.endpoint in ("embeddings", "responses"):
        body["input"] = "…"
    elif record.endpoint == "completions":
        body["prompt"] = "…"
    elif record.endpoint in ("rerank", "score"):
        return body | {"query": "…", "documents": ["…"]}
    else:
        body["messages"] = [{"role": "user", "content": "…"}]
    if record.max_tokens is not None and record.endpoint not in ("embeddings",):
        body["max_output_tokens" if record.endpoint == "responses" else "max_tokens"] = record.max_tokens
    if record.stream:
        body["stream"] = True
    return body
