"""API keys of a running platform."""

from __future__ import annotations

from typing import Any

import httpx2

from tests.support.stack import Stack


def revoke_key(stack: Stack, secret: str) -> None:
    keys = httpx2.get(f"{stack.url}/api/keys", headers=stack.headers, timeout=60).json()["results"]
    (id_,) = [key["id"] for key in keys if secret.startswith(key["prefix"])]
    assert httpx2.delete(f"{stack.url}/api/keys/{id_}", headers=stack.headers, timeout=60).status_code == 204


def make_key(stack: Stack, name: str, limits: dict[str, int] | None = None, **fields: Any) -> str:
    """Create a key of the demo tenant with its own limits and return its secret."""
    sent = {"name": name, "scopes": ["inference", "models"], **fields}
    response = httpx2.post(f"{stack.url}/api/keys", json=sent, headers=stack.headers, timeout=60)
    assert response.status_code == 201, response.text
    if limits:
        body = {"key_id": response.json()["id"], **limits}
        set_ = httpx2.post(f"{stack.url}/api/limits", json=body, headers=stack.headers, timeout=60)
        assert set_.status_code == 200, set_.text
    return str(response.json()["secret"])
