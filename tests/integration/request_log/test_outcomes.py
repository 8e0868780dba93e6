"""Labeled outcomes of requests with feedback, to train the complexity classifier."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest

from millrace.apps.request_log.models import RequestContent
from millrace.apps.request_log.outcomes import question_in
from tenants.isolation.scopes import tenant_scope
from tenants.models import Tenant
from tests.support.request_log.records import END, NOW, START, give_feedback, record
from tests.support.tenants.management_api import by_key

pytestmark = [pytest.mark.django_db, pytest.mark.acme(months=True)]


def store(tenant: Tenant, number: int, prompt: str, *, truncated: bool = False, **changes: Any) -> None:
    row = record(tenant, number, **changes)
    with tenant_scope(tenant):
        RequestContent.objects.create(
            tenant_id=tenant.pk,
            request_id=row.request_id,
            started_at=row.started_at,
            body=json.dumps({"messages": [{"role": "user", "content": prompt}]}),
            truncated=truncated,
        )


def test_prompts_with_feedback_are_returned_newest_first(acme: Tenant) -> None:
    store(acme, 0, "easy", served_model="small")
    store(acme, 1, "hard", served_model="large")
    store(acme, 2, "scored", served_model="small")
    store(acme, 3, "without feedback", served_model="small")
    store(acme, 4, "of another model", served_model="other")
    store(acme, 5, "of another name", requested_model="x", served_model="small")
    store(acme, 6, "cut", served_model="small", truncated=True)
    store(acme, 7, "label only", served_model="small")
    store(acme, 8, "old", served_model="small", started_at=NOW - timedelta(days=9))
    record(acme, 9, served_model="small")  # its prompt is not stored
    for number, success in ((0, True), (1, False), (4, True), (5, True), (6, True), (8, True), (9, True)):
        give_feedback(acme, number, success=success)
    give_feedback(acme, 2, score=0.4)
    give_feedback(acme, 7, label="x")
    query = {"model": "mine", "weak": "small", "strong": "large", "from": START.isoformat(), "to": END.isoformat()}
    response = by_key(acme).get("/api/requests/outcomes", query)
    assert response.status_code == 200
    assert response.json()["outcomes"] == [
        {"prompt": "easy", "weak_ok": True, "strong_ok": None},
        {"prompt": "hard", "weak_ok": None, "strong_ok": False},
        {"prompt": "scored", "weak_ok": False, "strong_ok": None},
    ]
    assert by_key(acme).get("/api/requests/outcomes", {"model": "mine"}).status_code == 400


@pytest.mark.parametrize(
    ("body", "question"),
    [
        ({"prompt": "text"}, "text"),
        ({"input": "text"}, "text"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]}, "a"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "a"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}, 3]}]}, "a"),
        ({"messages": [{"role": "system", "content": "a"}]}, ""),
        ({"prompt": [1, 2]}, ""),
        ({}, ""),
    ],
)
def test_the_last_user_message_of_a_body(body: Any, question: str) -> None:
    assert question_in(json.dumps(body)) == question
    assert question_in("{") == ""
