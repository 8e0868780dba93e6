"""Batches of a running platform."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from typing import Any

import httpx2
import openai

from tests.support.stack import MODEL, Stack, eventually

ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": MODEL, "messages": messages, "max_tokens": 3, **body},
    }


def entry(custom_id: str, **more: Any) -> Any:
    """Return an entry of a message batch."""
    params = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": 'Hello\n"you"'}], **more}
    return {"custom_id": custom_id, "params": params}


def upload(client: openai.OpenAI, lines: Iterable[Any]) -> str:
    text = "\n".join(json.dumps(line) for line in lines).encode()
    return client.files.create(file=("lines.jsonl", io.BytesIO(text)), purpose="batch").id


def finished(client: openai.OpenAI, name: str, seconds: float = 90) -> Any:
    eventually(lambda: client.batches.retrieve(name).status in ENDED, seconds)
    return client.batches.retrieve(name)


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    if file_id is None:
        return {}
    found = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def usage_events(stack: Stack) -> list[dict[str, Any]]:
    """Return all usage events of the tenant, newest first."""
    found: list[dict[str, Any]] = []
    url: str | None = f"{stack.url}/api/usage/events?limit=100"
    while url:
        response = httpx2.get(url, headers=stack.headers, timeout=60)
        assert response.status_code == 200, response.text
        answer = response.json()
        found += answer["results"]
        url = answer["next"]
    return found
