"""Readers of stored prompts: each is bounded in rows, bytes and memory, and no body makes one fail."""

from __future__ import annotations

import ast
import json
import tracemalloc
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from millrace.apps.answer_caches import prompt_digests
from millrace.apps.answer_caches.cache_warming import do_warm_caches
from millrace.apps.answer_caches.prompt_digests import compute_digests
from millrace.apps.feedback.models import SubmittedFeedback
from millrace.apps.request_log import selectors
from millrace.apps.request_log.models import RequestContent, RequestRecord
from millrace.apps.request_log.stored_prompts import decode_body, read_bodies
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope, tenant_scope
from tenants.models import Tenant
from tests.support.answer_caches.cache_warming import current, enable_warming, make_prices
from tests.support.request_log.records import NOW, record, settle
from tests.support.rows import of
from tests.support.tenants.management_api import by_key, by_role

pytestmark = pytest.mark.django_db
ROOT = Path(__file__).parents[3]
PROMPTS = 200
SPAN = (NOW - timedelta(days=2), NOW + timedelta(days=1))
MAX_MEMORY = 32 * 2**20  # the decoded bodies need 400 MB
# What each module does with stored prompts. Each that reads some is among the READERS.
MODULES = {
    "frontend/tenant/requests/messages.py": "shows those of one request",
    "platform/millrace/apps/request_log/models.py": "declares the table",
    "platform/millrace/apps/answer_caches/prompt_digests.py": "reads those without digests",
    "platform/millrace/apps/request_log/selectors.py": "reads those of one request, and searches",
    "platform/millrace/apps/request_log/stored_prompts.py": "reads those of requests",
    "platform/millrace/apps/request_log/tasks.py": "removes them",
    "platform/millrace/apps/answer_caches/warming_settlement.py": "removes those of warmed prompts",
    "platform/millrace/client/models.py": "declares the response of the API",
    "platform/millrace/gateway/lifecycle/request_log.py": "writes them",
}


def _period(**fields: str) -> dict[str, str]:
    return {"from": SPAN[0].isoformat(), "to": SPAN[1].isoformat(), **fields}


def _get(path: str, **query: str) -> Callable[[Tenant], Any]:
    def get(tenant: Tenant) -> Any:
        response = by_key(tenant).get(path, query)
        assert response.status_code == 200, response.content
        return response.json()

    return get


def _show(path: str, role: str) -> Callable[[Tenant], Any]:
    def show(tenant: Tenant) -> None:
        response = by_role(tenant, role).get(path)
        assert response.status_code == 200, path

    return show


def _search(tenant: Tenant) -> None:
    with tenant_scope(tenant):
        found = selectors.search_content(tenant.pk, "hello", *SPAN)
    assert found.searched > 0


OUTCOMES = {"model": "mine", "weak": "alpha", "strong": "beta"}
READERS: dict[str, Callable[[Tenant], Any]] = {
    "cache warming": lambda tenant: do_warm_caches(current(tenant), now=NOW),
    "outcomes": _get("/api/requests/outcomes", **_period(**OUTCOMES)),
    "advice": _get("/api/requests/prompt-advice", **_period()),
    "request": _get("/api/requests/req_h0000"),
    "search": _search,
    "request page": _show("/t/acme/requests/req_h0000", "owner"),
    "playground": _show("/t/acme/playground/?request=req_h0000", "developer"),
}


def hostile_body(number: int) -> str:
    """Return a body of 63 KB whose unknown field needs 2 MB of memory."""
    messages = [{"role": "user", "content": f"Hello {number // 2}"}]
    fields = {"model": "mine", "messages": messages, "temperature": 0}
    return f'{json.dumps(fields)[:-1]}, "x": [{"{}," * 20_800}{{}}]}}'


def store(tenant: Tenant, bodies: list[str]) -> None:
    """Store requests with these bodies, half of them a day before, with feedback."""
    template = record(tenant, request_id="req_template", prompt_tokens=100, max_tokens=50, cache_layer="computed")
    fields = {field.attname: getattr(template, field.attname) for field in RequestRecord._meta.concrete_fields}
    fields["route"] = {"answer_cache": {"miss": "not_cached"}}
    records, contents, feedback = [], [], []
    for number, body in enumerate(bodies):
        name, at = f"req_h{number:04}", _time_of(number)
        records.append(RequestRecord(**fields | {"request_id": name, "started_at": at}))
        row = {"tenant_id": tenant.pk, "request_id": name}
        contents.append(RequestContent(**row, started_at=at, body=body, truncated=False))
        feedback.append(SubmittedFeedback(**row, key_id=1, success=True))
    with all_tenants_scope(BypassReason.COMMAND):
        RequestRecord.objects.all_tenants().bulk_create(records)
        RequestContent.objects.all_tenants().bulk_create(contents, batch_size=50)
        SubmittedFeedback.objects.all_tenants().bulk_create(feedback)
    for number in range(min(20, len(bodies))):
        missed = {"miss_reason": "prefix_changed", "changed_at": 100 * (number // 2)}
        settle(tenant, f"req_h{number:04}", at=_time_of(number), uncached=100, output=40, missed=missed)


def _time_of(number: int) -> datetime:
    return NOW - timedelta(days=number % 2, seconds=number)


@pytest.fixture
def acme(acme: Tenant) -> Tenant:
    make_prices()
    return enable_warming(acme)


def test_every_module_that_uses_stored_prompts_is_listed() -> None:
    found = set()
    for directory in ("billing", "frontend", "platform", "tenants"):
        for path in (ROOT / directory).rglob("*.py"):
            tree = ast.parse(path.read_text())
            names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
            names |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
            texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            is_sql = any(isinstance(text, str) and "request_log_requestcontent" in text for text in texts)
            if "migrations" not in path.parts and ("RequestContent" in names or is_sql):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == set(MODULES)


def test_each_reader_is_bounded_in_memory(acme: Tenant) -> None:
    store(acme, [hostile_body(number) for number in range(PROMPTS)])
    peaks = {}
    tracemalloc.start()
    try:
        for name, read in READERS.items():
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            read(acme)
            peaks[name] = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert {name: peak for name, peak in peaks.items() if peak > MAX_MEMORY} == {}


DEEP, INDENTED = 5_000, 400


def _nested(depth: int) -> str:
    return "[" * depth + "]" * depth


BODIES = {
    "deep field": f'{{"model": "mine", "messages": [{{"role": "user", "content": "Hello"}}], "x": {_nested(DEEP)}}}',
    "deep for an indentation": f'{{"model": "mine", "messages": [], "tools": {_nested(INDENTED)}}}',
    "deep message": '{"model": "mine", "messages": ' + '[{"content":' * DEEP + "1" + "}]" * DEEP + "}",
    "list": "[1]",
    "number": "1",
    "null": "null",
    "no JSON": "Hello",
    "messages of another type": '{"model": "mine", "messages": "Hello"}',
    "no text": '{"model": "mine", "messages": [1, null, {"role": 5, "content": [{"text": 3}]}]}',
    "large number": '{"model": "mine", "messages": [], "n": ' + "9" * 5_000 + "}",
    "lone surrogate": '{"model": "mine", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "empty": "",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_no_body_makes_a_reader_fail(acme: Tenant, body: str) -> None:
    store(acme, [body] * 4)
    for read in READERS.values():
        read(acme)


def test_bodies_are_read_up_to_the_bounds_newest_first(acme: Tenant) -> None:
    store(acme, ["a" * 100, "b" * 100, "c" * 100, "d" * 100])
    ids = [f"req_h{number:04}" for number in range(4)]
    with tenant_scope(acme):
        RequestContent.objects.for_tenant(acme).filter(request_id=ids[2]).update(truncated=True)
        newest = [ids[0], ids[1], ids[3]]
        assert [body.request_id for body in read_bodies(acme.pk, ids)] == newest
        assert [body.request_id for body in read_bodies(acme.pk, ids, max_bytes=299)] == newest[:2]
        assert [body.request_id for body in read_bodies(acme.pk, ids, max_rows=1)] == newest[:1]
        assert [body.request_id for body in read_bodies(acme.pk, ids[3:])] == ids[3:]
        assert list(read_bodies(acme.pk, [])) == []


def test_a_search_reads_up_to_its_bounds(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    store(acme, ["hello " * 20] * 4)

    def searched(**bounds: int) -> tuple[int, bool]:
        with monkeypatch.context() as patch, tenant_scope(acme):
            for name, value in bounds.items():
                patch.setattr(selectors, name, value)
            found = selectors.search_content(acme.pk, "hello", *SPAN)
            assert len(found.request_ids) == found.searched
            return found.searched, found.complete

    assert searched() == (4, True)
    assert searched(MAX_SEARCHED=4) == (4, True)
    assert searched(MAX_SEARCHED=3) == (3, False)
    assert searched(MAX_SEARCHED_BYTES=300) == (2, False)
    assert searched(MAX_SEARCHED_BYTES=1) == (1, False)


def test_digests_are_computed_once_up_to_the_bound(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    store(acme, [json.dumps({"model": "mine", "prompt": "a" * 100}) for _ in range(4)])
    decoded: list[str] = []
    monkeypatch.setattr(prompt_digests, "decode_body", lambda text: decoded.append(text) or decode_body(text))
    monkeypatch.setattr(prompt_digests, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(prompt_digests, "MAX_DIGESTED_BYTES", 200)
    assert [compute_digests(acme.pk, SPAN[0]) > 0 for _ in range(3)] == [True, True, False]
    assert len(decoded) == 4
    assert all(row.digests["answer"] for row in of(RequestContent, acme))


def test_a_run_copies_prompts_up_to_the_bound(acme: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.apps.answer_caches.cache_warming.MAX_COPIED_BYTES", 1)
    store(acme, [hostile_body(0)] * 2)
    assert do_warm_caches(current(acme), now=NOW).prompts == 0
