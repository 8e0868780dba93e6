"""Cache warming on a running platform: a frequent prompt is computed in a batch, and its next request is a hit."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx2
import psycopg
import pytest

from tests.support.stack import MODEL, Stack, eventually

BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "List the primary colors."}],
    "temperature": 0,
    "max_tokens": 8,
}
BUDGET_NANO = 10**9
# The requests were sent yesterday at this time, and their answers have expired.
_MOVE = """
UPDATE {table} SET started_at = started_at - interval '1 day' + interval '10 minutes' WHERE request_id = ANY(%(ids)s)
"""
# So was a request on each of the days before. A week ago, the history began.
_REPEAT = """
INSERT INTO {table} SELECT (jsonb_populate_record(NULL::{table}, to_jsonb(r) || jsonb_build_object(
    'request_id', r.request_id || 'd' || day,
    'started_at', r.started_at - CASE day WHEN 7 THEN interval '6 days 1 hour' ELSE make_interval(days => day) END
))).* FROM {table} r, generate_series(1, 7) AS day WHERE r.request_id = %(id)s
"""
_TABLES = ("request_log_requestrecord", "request_log_requestcontent")
_RECORDS = "SELECT 1 FROM request_log_requestrecord WHERE request_id = ANY(%(ids)s)"
_CONTENT = "SELECT 1 FROM request_log_requestcontent WHERE request_id = %(id)s"
_BATCH = """
SELECT status, name, input_file, output_file FROM batches_batch
WHERE id = (SELECT batch_id FROM request_log_warmedprompt ORDER BY id DESC LIMIT 1)
"""


@pytest.fixture
def warmed(stack: Stack) -> Iterator[Stack]:
    """The platform, with a tenant that opted in."""
    _change(stack, answer_cache_seconds=1, content_retention_days=30, cache_warming_nano=BUDGET_NANO)
    yield stack
    _change(stack, answer_cache_seconds=0, content_retention_days=0, cache_warming_nano=0)
    _execute(stack, "DELETE FROM request_log_warmedprompt")


def _change(stack: Stack, **fields: int) -> None:
    response = httpx2.patch(f"{stack.url}/api/tenant", json=fields, headers=stack.headers, timeout=60)
    assert response.status_code == 200, response.text


def _execute(stack: Stack, statement: str, **fields: Any) -> list[Any]:
    with psycopg.connect(stack.database_url) as connection:
        cursor = connection.execute(statement, fields)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []


def test_a_warmed_prompt_is_a_hit_and_its_cost_and_saving_are_shown(warmed: Stack) -> None:
    stack = warmed

    def send() -> httpx2.Response:
        return httpx2.post(f"{stack.url}/v1/chat/completions", json=BODY, headers=stack.headers, timeout=120)

    def warm() -> dict[str, Any]:
        response = httpx2.post(f"{stack.url}/api/cache-warming/run", headers=stack.headers, timeout=60)
        assert response.status_code == 202, response.text
        url = f"{stack.url}{response.headers['location']}"
        eventually(lambda: httpx2.get(url, headers=stack.headers, timeout=60).json()["status"] == "completed")
        return dict(httpx2.get(f"{url}/result", headers=stack.headers, timeout=60).json())

    def status() -> dict[str, Any]:
        response = httpx2.get(f"{stack.url}/api/cache-warming", headers=stack.headers, timeout=60)
        assert response.status_code == 200, response.text
        return dict(response.json())

    original: list[httpx2.Response] = []

    def ids() -> list[str]:
        return [response.headers["x-request-id"] for response in original]

    def is_logged() -> bool:
        """Return whether a request was sent after the settings have reached the gateway, which then logs its prompt."""
        original.append(send())
        assert original[-1].status_code == 200, original[-1].text
        eventually(lambda: len(_execute(stack, _RECORDS, ids=ids())) == len(original))
        stored = _execute(stack, _CONTENT, id=ids()[-1])
        return bool(stored) and original[-1].headers["x-millrace-cache"] in ("miss", "prefix")

    eventually(is_logged)
    stack.event(ids()[-1])
    for table in _TABLES:
        _execute(stack, _MOVE.format(table=table), ids=ids())
        _execute(stack, _REPEAT.format(table=table), id=ids()[-1])
    _change(stack, answer_cache_seconds=3600)
    run = warm()
    assert run["prompts"] == 1, run
    assert warm()["prompts"] == 0

    eventually(lambda: _execute(stack, _BATCH)[0][0] == "completed")
    _, name, *files = _execute(stack, _BATCH)[0]
    # No key sees the copies of prompts and answers.
    for path in (f"batches/{name}", *(f"files/{file}{suffix}" for file in files for suffix in ("", "/content"))):
        assert httpx2.get(f"{stack.url}/v1/{path}", headers=stack.headers, timeout=60).status_code == 404, path
    for path in ("batches", "files"):
        listed = httpx2.get(f"{stack.url}/v1/{path}", headers=stack.headers, timeout=60).json()["data"]
        assert not {name, *files} & {each["id"] for each in listed}
    hit = send()
    assert hit.headers["x-millrace-cache"] == "exact", hit.headers
    assert hit.json()["choices"] == original[-1].json()["choices"]
    event = stack.event(hit.headers["x-request-id"])

    def is_settled() -> bool:
        warm()
        return bool(status()["hits"]) and status()["results"][0]["cost_usd"] is not None

    eventually(is_settled)
    found = status()
    (prompt,) = found["results"]
    computed = stack.event(prompt["request_id"])
    assert (computed["output"], computed["outcome"]) == (8, "completed")
    assert Decimal(prompt["cost_usd"]) == Decimal(computed["cost"]["usd"]) == Decimal(found["spent_usd"]) > 0
    assert Decimal(prompt["saved_usd"]) == Decimal(event["cost"]["saved_usd"]) == Decimal(found["saved_usd"]) > 0
    assert (found["prompts"], found["computed"], found["used"], found["hits"]) == (1, 1, 1, 1)
    # The copies of the prompt are gone.
    assert _execute(stack, _CONTENT, id=prompt["request_id"]) == []
    assert not [name for name in files if (stack.data_dir / "files" / name).exists()]
