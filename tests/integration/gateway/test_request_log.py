"""Request records: their contents, and their way to the database, with a count of dropped ones."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from asgiref.sync import sync_to_async
from django.db import connection

from billing.rates.pricing import RateCard, Tier
from inference_worker.contract.request import SamplingParams
from millrace.apps.request_log.models import RequestContent, RequestRecord
from millrace.gateway.admission.admission import AdmittedRequest, RateLimitAdmission
from millrace.gateway.admission.limits import LimitCost, make_checks
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.limit_status import LimitStatus
from millrace.gateway.core.request_db import TenantConnectionPool
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.lifecycle import request_log
from millrace.gateway.lifecycle.request_log import RequestLogWriter, RequestTrace
from tenants.keys.snapshot import ApiKeySnapshot, LimitSetSnapshot, LimitSnapshot
from tenants.routing_policies.experiments import ArmAssignment
from tests.support.gateway.inference_requests import make_request
from tests.support.gateway.keys import KEY, make_demand
from tests.support.rows import unscoped
from tests.support.waiting import eventually_async

LIMIT = LimitSetSnapshot(7, "key", requests_per_minute=3, tokens_per_day=1000)
TRIAL = LimitSetSnapshot(8, "tenant", dry_run=True, max_prompt_tokens=5)


def request(model: str = "m", **changes: Any) -> InferenceRequest:
    return make_request(model, **changes)


def limit_statuses(refused: str = "") -> list[LimitStatus]:
    checks = make_checks(1, [LIMIT, TRIAL], LimitCost(1, 10, 20))
    return [LimitStatus(check, 400 * (check.name == refused), check.cost * check.period[0]) for check in checks]


def call(texts: Sequence[str] = (), **changes: Any) -> Any:
    """Return the service's record of an admitted request."""
    executions = [
        {"execution": 0, "attempt": 1, "model": "m1", "replica": "r", "by": "prefix", "load": 0, "credits": 9}
    ]
    decision_record: dict[str, Any] = {
        "tenant": 1,
        "requested_model": "m",
        "policy": {"version": 2, "rule": 0, "draw": 1},
        "targets": ["m1", "m2"],
    }
    decision_record |= {
        "metadata": {"secret": "word"},
        "user": "another-user",
        "executions": executions,
        "skipped": [{"model": "m2", "reason": "x"}],
    }
    demand = make_demand(KEY)
    rate_card = RateCard(5, None, "m1", Tier.STANDARD, 0, ())
    admitted = AdmittedRequest(demand, 20, rate_card, reserved_nano=300, budget_period_ids=[4, 9], **changes)
    execution = SimpleNamespace(
        admitted=msgspec.structs.replace(admitted, limit_statuses=limit_statuses()),
        first_token_at=time.monotonic() + 1,
        completed_at=time.monotonic() + 1.9,
        output_tokens=10,
        finish_reason="stop",
        call_arguments={},
        completion_texts={index: [text] for index, text in enumerate(texts)},
        cache_layer="computed",
        answer=None,
    )
    return SimpleNamespace(
        key=KEY,
        route=SimpleNamespace(assignment=None),
        request=SimpleNamespace(
            user="another-user",
            end_user="another-user",
            metadata={"secret": "word"},
            structured=None,
            tools=(),
            tool_choice="auto",
            sampling=SamplingParams(),
        ),
        decision_record=DecisionRecord(**decision_record),
        prompt=demand.prompt,
        model="m1",
        ignored=(),
        executions=[execution],
        execution=execution,
    )


def record_of(trace: RequestTrace, status: str = "200", *, complete: bool = True) -> dict[str, Any]:
    return dict(msgspec.to_builtins(trace.record("gw-1", status, complete=complete)))


@pytest.mark.parametrize(
    ("user", "stored"),
    [(None, ""), ("Zoë", "Zoë"), ("a\0b", "ab"), ("名" * 200, "名" * 128), ("x" * 128 + "\0", "x" * 128)],
)
def test_the_usage_of_a_request_has_its_end_user(user: str | None, stored: str) -> None:
    admitted = AdmittedRequest(make_demand(KEY, user=user), 20)
    assert admitted.billing_context.end_user == stored


def test_the_record_of_a_completed_request() -> None:
    trace = RequestTrace(KEY, "req_1", "completions")
    trace.set_request(request(stream=True, ignored=("store", "mood")), b"{}")
    active = call()
    active.ignored = ("store", "mood", "verbosity")  # the last one was found with the model
    trace.active_requests.append(active)
    record = record_of(trace)
    assert record["ignored"] == ("store", "mood", "verbosity")
    assert (record["requested_model"], record["served_model"], record["stream"], record["outcome"]) == (
        "m",
        "m1",
        True,
        "completed",
    )
    assert [(limit["name"], limit["limit"], limit["left"]) for limit in record["limits"]] == [
        ("requests_per_minute", 3, 2),
        ("tokens_per_day", 1000, 970),
        ("max_prompt_tokens", 5, 0),
    ]
    assert [limit.get("dry") for limit in record["limits"]] == [None, None, True]
    assert record["placements"][0]["by"] == "prefix"
    assert record["route"].keys() == {"policy", "targets", "skipped"}  # and no metadata of the caller
    assert (record["reserved_nano"], record["price_version"], record["budget_periods"]) == (300, 5, [4, 9])
    assert (record["prompt_tokens"], record["max_tokens"]) == (10, 20)
    assert 900 < record["ttft_ms"] <= 1100
    assert (record["end_user"], record["failure"], record["experiment_id"]) == ("another-user", "", None)
    assert 99_000 < record["itl_us"] < 101_000
    assert trace.content() is None


def test_the_record_of_a_request_in_an_experiment() -> None:
    records = []
    for user, finish_reason in (("a", "stop"), ("a", "length"), ("b", "stop"), (None, "stop")):
        trace = RequestTrace(KEY, "req_1", "completions")
        active = call()
        active.request.user, active.request.structured = user, "a schema"
        active.execution.finish_reason = finish_reason
        active.execution.call_arguments = {(0, 0): '{"a": 1}', (0, 1): "{" if user is None else ""}
        active.route.assignment = ArmAssignment(7, 1, "f0")
        trace.active_requests.append(active)
        records.append(record_of(trace))
    assert {(row["experiment_id"], row["experiment_arm"], row["experiment_unit"]) for row in records} == {(7, 1, "f0")}
    assert [row["failure"] for row in records] == ["", "schema", "", "tool"]
    keys = [row["retry_key"] for row in records]
    assert keys[0] == keys[1] != keys[2]
    assert keys[3] is None


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["exact"], ("exact", "req_source")),
        (["single_flight"], ("single_flight", "req_source")),
        (["computed"], ("computed", "")),
        (["exact", "prefix"], ("prefix", "")),
        (["prefix", "computed"], ("computed", "")),
        (["exact", ""], ("", "")),
    ],
)
def test_the_record_has_the_layer_with_the_most_computation(layers: list[str], expected: tuple[str, str]) -> None:
    trace = RequestTrace(KEY, "req_1", "completions")
    for layer in layers:
        trace.active_requests.append(call())
        served = layer if layer in ("exact", "single_flight") else ""
        trace.active_requests[-1].execution.cache_layer = layer
        trace.active_requests[-1].execution.answer = SimpleNamespace(layer=served, source="req_source")
    record = record_of(trace)
    assert (record["cache_layer"], record["cache_source"]) == expected


@pytest.mark.parametrize(("ran", "served"), [(False, ""), (True, "m1")])
def test_a_request_that_was_rejected_before_it_ran_has_no_model(ran: bool, served: str) -> None:
    trace = RequestTrace(KEY, "req_1", "completions")
    trace.active_requests.append(call())
    if not ran:
        trace.active_requests[0].decision_record.executions = msgspec.UNSET
    trace.error = ApiError("budget_exceeded", "")
    assert record_of(trace, "429")["served_model"] == served


def test_several_prompts_are_one_record() -> None:
    trace = RequestTrace(KEY, "req_1", "completions")
    trace.active_requests += [call(), call()]
    record = record_of(trace)
    assert (record["prompts"], record["prompt_tokens"], record["reserved_nano"]) == (2, 20, 600)


@pytest.mark.parametrize(
    ("status", "code", "complete", "verdict"),
    [
        ("200", "", True, "completed"),
        ("200", "", False, "cancelled"),
        ("nothing", "", False, "cancelled"),
        ("499", "cancelled", True, "cancelled"),
        ("stream_cancelled", "cancelled", True, "cancelled"),
        ("stream_worker_lost", "worker_lost", True, "failed"),
        ("503", "server_is_overloaded", True, "failed"),
        ("529", "server_is_overloaded", True, "failed"),
        ("429", "rate_limit_exceeded", True, "limited"),
        ("402", "budget_exceeded", True, "limited"),
        ("400", "invalid_value", True, "refused"),
    ],
)
def test_outcomes(status: str, code: str, complete: bool, verdict: str) -> None:
    trace = RequestTrace(KEY, "req_1", "messages")
    trace.error = ApiError(code, "") if code else None
    assert record_of(trace, status, complete=complete)["outcome"] == verdict


async def test_a_record_names_the_limit_that_rejected_the_request(broker: Any) -> None:
    admission = RateLimitAdmission(broker)
    tight = LimitSetSnapshot(9, "project", model="m", requests_per_minute=1)
    key = msgspec.structs.replace(KEY, limits=LimitSnapshot((tight,)))
    demand = make_demand(key, max_tokens=5)
    await admission.admit(demand)
    with pytest.raises(ApiError) as exc_info:
        await admission.admit(demand)
    trace = RequestTrace(key, "req_1", "completions")
    trace.error = exc_info.value
    record = record_of(trace, "429")
    assert record["limited_by"].pop("reset_ms") > 50_000
    assert record["limited_by"] == {
        **{"kind": "limit", "scope": "project", "id": 9, "model": "m", "name": "requests_per_minute"},
        **{"limit": 1, "left": 0, "needed": 1},
    }
    assert [limit["refused"] for limit in record["limits"]] == [True]


# Writing to the database.


@pytest_asyncio.fixture
async def rows(transactional_db: None) -> AsyncIterator[TenantConnectionPool]:
    rows = TenantConnectionPool(await sync_to_async(_url)())
    await rows.open()
    yield rows
    await rows.close()
    await sync_to_async(lambda: connection.close())()


def _url() -> str:
    from psycopg.conninfo import make_conninfo

    from millrace.environment.configuration import platform_settings

    return make_conninfo(platform_settings().database_url, dbname=connection.settings_dict["NAME"])


class Lost:
    """A fake counter of the metrics."""

    def __init__(self) -> None:
        self.records_lost = self
        self.count = 0

    def labels(self, kind: str) -> Lost:
        return self

    def inc(self, number: int = 1) -> None:
        self.count += number


everything = sync_to_async(lambda model: list(unscoped(model).order_by("request_id")))


async def test_records_are_written_once(rows: TenantConnectionPool) -> None:
    lost: Any = Lost()
    recorder = RequestLogWriter(rows, "gw-1", lost)
    for number in range(3):
        trace = RequestTrace(KEY, f"req_{number}", "completions")
        trace.set_request(request("mine\0"), None)
        trace.active_requests.append(call())
        recorder.end(trace, "200")
        if number == 2:
            recorder.end(trace, "200")  # as if the response to the commit were lost
    before = datetime.now(UTC)
    await recorder.flush()
    found: list[RequestRecord] = await everything(RequestRecord)
    assert [row.request_id for row in found] == ["req_0", "req_1", "req_2"]
    row = found[0]
    assert (row.requested_model, row.served_model, row.gateway_id, row.limits[0]["left"]) == ("mine", "m1", "gw-1", 2)
    assert 0 <= (before - row.started_at).total_seconds() < 10
    assert (row.budget_periods, row.placements[0]["replica"], row.limited_by) == ([4, 9], "r", None)
    assert lost.count == 0
    await recorder.flush()
    assert len(await everything(RequestRecord)) == 3


async def test_prompts_and_outputs_are_stored_only_if_logging_is_on(
    rows: TenantConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "MAX_CONTENT_CHARACTERS", 20)
    lost: Any = Lost()
    recorder = RequestLogWriter(rows, "gw-1", lost)
    keeps: ApiKeySnapshot = msgspec.structs.replace(KEY, content_retention_days=2)
    for key, name in ((KEY, "req_0"), (keeps, "req_1"), (keeps, "req_2")):
        trace = RequestTrace(key, name, "completions")
        trace.set_request(request(), b'{"prompt": "\\u0000"}' + b" " * 9 * (name == "req_2"))
        trace.active_requests.append(call(["four", "\0an answer that is too long"]))
        recorder.end(trace, "200")
    await recorder.flush()
    first, second = await everything(RequestContent)
    assert (first.request_id, first.body, first.truncated) == ("req_1", '{"prompt": "\\u0000"}', True)
    assert first.answers == ["four", "an answer that i"[:15]]
    assert len(second.body) == 20
    assert lost.count == 0


async def test_while_the_database_is_unavailable_the_newest_records_are_kept(
    rows: TenantConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "MAX_PENDING_RECORDS", 3)
    lost: Any = Lost()
    nowhere = TenantConnectionPool("postgresql://unknown@127.0.0.1:1/none")
    monkeypatch.setattr("millrace.gateway.core.request_db.WAIT_SECONDS", 0.1)
    await nowhere.open()
    recorder = RequestLogWriter(nowhere, "gw-1", lost)
    for number in range(5):
        recorder.end(RequestTrace(KEY, f"req_{number}", "completions"), "200")
    await recorder.flush()
    assert lost.count == 2
    await nowhere.close()
    recorder._database = rows
    await recorder.flush()
    assert [row.request_id for row in await everything(RequestRecord)] == ["req_2", "req_3", "req_4"]


async def test_a_record_that_the_database_rejects_is_skipped(rows: TenantConnectionPool) -> None:
    lost: Any = Lost()
    recorder = RequestLogWriter(rows, "gw-1", lost)
    recorder.end(RequestTrace(KEY, "x" * 65, "completions"), "200")  # longer than any request ID
    await recorder.flush()
    recorder.end(RequestTrace(KEY, "req_1", "completions"), "200")
    await recorder.flush()
    assert [row.request_id for row in await everything(RequestRecord)] == ["req_1"]
    assert lost.count == 1


async def test_records_are_written_regularly_and_at_the_end(
    rows: TenantConnectionPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log, "FLUSH_SECONDS", 0.05)
    lost: Any = Lost()
    recorder = RequestLogWriter(rows, "gw-1", lost)
    await recorder.start()
    recorder.end(RequestTrace(KEY, "req_1", "completions"), "200")
    await eventually_async(lambda: everything(RequestRecord))
    recorder.end(RequestTrace(KEY, "req_2", "completions"), "200")
    await recorder.stop()
    assert len(await everything(RequestRecord)) == 2
