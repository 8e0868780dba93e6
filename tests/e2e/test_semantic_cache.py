"""Similar questions on a running platform, with the bundled models: served after enough checks, and billed as hits."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import httpx2
import psycopg
import pytest

from inference_worker.contract.settings import parse_models
from tests.support.stack import EMBEDDING_MODEL, MODEL, Stack, eventually

QUESTIONS = ("What is the capital of France?", "How many legs does a spider have?", "Who wrote the play Hamlet?")
SIMILAR = "Which city is the capital of France?"
SYSTEM = {"role": "system", "content": "Answer in one sentence. " * 300}  # a prompt process reads it
_EVIDENCE = """
INSERT INTO request_log_semanticevidence (tenant_id, embedding, band, correct, wrong, updated_at)
SELECT id, '{embedding}', band, 1000, 0, now() FROM tenants_tenant, generate_series(0, 3) AS band
WHERE slug = 'demo' ON CONFLICT DO NOTHING
"""
_CLEAR = ("DELETE FROM request_log_semanticevidence", "DELETE FROM request_log_semanticentry")


@pytest.fixture
def similar(stack: Stack) -> Iterator[Stack]:
    """The platform, with a model name that serves similar questions."""
    _change(stack, answer_cache_seconds=600, semantic_cache_max_error_percent=20, content_retention_days=1)
    body = {"rules": [{"targets": [{"model": MODEL}]}], "semantic_cache": True}
    response = httpx2.post(f"{stack.url}/api/policies", json={"name": "similar", "body": body}, headers=stack.headers)
    assert response.status_code == 201, response.text
    policy = response.json()["id"]
    yield stack
    _change(stack, answer_cache_seconds=0, semantic_cache_max_error_percent=0, content_retention_days=0)
    assert httpx2.delete(f"{stack.url}/api/policies/{policy}", headers=stack.headers).is_success
    for statement in _CLEAR:
        _execute(stack, statement)


def _change(stack: Stack, **fields: int) -> None:
    response = httpx2.patch(f"{stack.url}/api/tenant", json=fields, headers=stack.headers, timeout=60)
    assert response.status_code == 200, response.text


def _execute(stack: Stack, statement: str, **fields: str) -> list[Any]:
    with psycopg.connect(stack.database_url) as connection:
        cursor = connection.execute(statement, fields or None)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []


@pytest.mark.parametrize("messages", [[], [SYSTEM]])
def test_a_similar_question_receives_the_cached_answer(similar: Stack, messages: list[dict[str, str]]) -> None:
    stack = similar

    def ask(question: str, **headers: str) -> httpx2.Response:
        conversation = [*messages, {"role": "user", "content": question}]
        body = {"model": "similar", "messages": conversation, "temperature": 0, "max_tokens": 16}
        url = f"{stack.url}/v1/chat/completions"
        return httpx2.post(url, json=body, headers=stack.headers | headers, timeout=120)

    eventually(lambda: ask("Are you there?").status_code == 200)  # the policy has reached the gateway
    computed = [ask(question) for question in QUESTIONS]
    assert {response.status_code for response in computed} == {200}
    eventually(lambda: _execute(stack, "SELECT count(*) FROM request_log_semanticentry")[0][0] >= len(QUESTIONS))
    (spec,) = parse_models(f"{EMBEDDING_MODEL}=embedded:minilm")
    _execute(stack, _EVIDENCE.format(embedding=spec.key))
    _execute(stack, "UPDATE request_log_semanticentry SET answer_group = id")  # the small model repeats itself
    answer = ask(SIMILAR)
    assert answer.headers["x-millrace-cache"] == "semantic", answer.headers
    assert 0.8 < float(answer.headers["x-millrace-cache-similarity"]) < 1
    assert answer.headers["x-millrace-cache-source"] == computed[0].headers["x-request-id"]
    choices = [response.json()["choices"][0]["message"]["content"] for response in (answer, computed[0])]
    assert choices[0] == choices[1]
    usage = answer.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"]
    assert usage["prompt_tokens"] != computed[0].json()["usage"]["prompt_tokens"]
    event = stack.event(answer.headers["x-request-id"])
    hits = event["answer_hits"]
    assert (hits["input"], hits["output"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert Decimal(event["cost"]["usd"]) == Decimal(answer.headers["x-millrace-cost-usd"])
    vector = stack.event(f"{answer.headers['x-request-id']}.q")
    assert (vector["model"], vector["output"]) == (EMBEDDING_MODEL, 0)
    # Another system prompt is another conversation.
    body: dict[str, Any] = {"model": "similar", "temperature": 0, "max_tokens": 16}
    body["messages"] = [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": SIMILAR}]
    only = stack.headers | {"x-millrace-cache": "only-if-cached"}
    rejected = httpx2.post(f"{stack.url}/v1/chat/completions", json=body, headers=only, timeout=120)
    assert rejected.status_code == 412, rejected.text
    other = httpx2.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.headers, timeout=120)
    assert other.headers["x-millrace-cache"] in ("miss", "prefix")
    # The vector of the rejected request is not billed.
    question = f"{rejected.headers['x-request-id']}.q"
    billed = "SELECT sum(cost_femto) FROM billing_usagechange WHERE request_id = %(id)s"
    eventually(lambda: _execute(stack, billed, id=question)[0][0] == 0)
