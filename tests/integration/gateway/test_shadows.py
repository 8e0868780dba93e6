"""Shadows: they never delay or fail a request, never exceed a budget, and each is billed once or booked once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import redis.asyncio as redis
from asgiref.sync import sync_to_async
from django.db import connection
from psycopg.conninfo import make_conninfo

from billing.models import BudgetPeriod, ExecutionCost, UsageEvent
from billing.rates.pricing import PriceIndex
from inference_worker.contract.messages import (
    USAGE_STREAM,
    End,
    ExecutionUsage,
    Failed,
    Tokens,
    control_channel,
    decode_usage,
    encode,
)
from inference_worker.contract.request import SamplingParams, TokenCounts
from millrace.apps.policy_results.models import ShadowComparison
from millrace.environment.configuration import Payer, platform_settings
from millrace.gateway.answer_cache.side_executions import SideExecutions
from millrace.gateway.core.decision_record import DecisionRecord
from millrace.gateway.core.errors import OVERLOADED, ApiError
from millrace.gateway.core.request_db import TenantConnectionPool
from millrace.gateway.core.types import InferenceRequest, Prompt, ResponseSpec
from millrace.gateway.dispatch.dispatcher import Dispatcher
from millrace.gateway.dispatch.jobs import InferenceJobBuilder
from millrace.gateway.dispatch.metrics import GatewayMetrics
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.request_log import RequestLogWriter, ShadowRecord
from millrace.gateway.lifecycle.service import InferenceService
from millrace.gateway.protocols.openai import completions
from millrace.gateway.stages import shadows as shadows_module
from millrace.gateway.stages.shadows import Shadows, is_selected
from tenants.keys.snapshot import ApiKeySnapshot
from tests.support.billing.books import rate_card
from tests.support.gateway.budgets import budget_period, check_invariants, settle_events
from tests.support.gateway.escalations import (
    LARGE,
    MODELS,
    PROMPT,
    SMALL,
    Workers,
    make_service,
    not_started,
    with_policy,
)
from tests.support.gateway.replica import GATEWAY, Replica
from tests.support.gateway.service_gates import Gate, make_key
from tests.support.gateway.services import find_opened, recorded, replace_stage
from tests.support.rows import unscoped
from tests.support.waiting import eventually_async

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table")]
RULES = [{"targets": [{"model": "small"}]}]
POLICY = {"rules": RULES, "shadow": {"model": "large", "percent": 100}}
SHADOWED = {"rules": [{"targets": [{"model": "a"}]}], "shadow": {"model": "b", "percent": 100}}


class ShadowWorkers(Workers):
    """A dispatcher whose executions answer immediately, and whose replicas are idle."""

    def relative_load(self, key: str) -> float | None:
        return 0.0


def make_shadows(
    service: InferenceService, dispatcher: Dispatcher, request_log: Any, payer: Payer = "tenant", prices: Any = None
) -> Shadows:
    router, admission = service._routing.router, service._starter._admission
    executions = SideExecutions(admission, dispatcher, InferenceJobBuilder(GATEWAY, "secret", 60))
    made = Shadows(
        router,
        admission,
        dispatcher,
        executions,
        prices or PriceIndex(),
        request_log,
        GatewayMetrics(dispatcher.replicas),
        payer,
        service._routing.tokenizer,
    )
    replace_stage(service, made)
    return made


async def finish(shadows: Shadows) -> None:
    async with asyncio.timeout(60):
        while shadows._running:
            await asyncio.gather(*shadows._running)


# Money: the sum is reserved, and each execution is billed once.


async def run(service: InferenceService, key: ApiKeySnapshot, number: int) -> ActiveRequest | str:
    request = InferenceRequest("mine", [1] * PROMPT, SamplingParams(), 500)
    try:
        active = await service.begin(key, request, completions.DIALECT, f"req_{number}")
    except ApiError as exc:
        return exc.code
    events = [event async for event in service.events(active)]
    service.release(active)
    assert [event.text for event in events if isinstance(event, Tokens)] == ["bad"]  # that of the small model
    return active


@pytest.mark.parametrize(
    ("limit", "requests", "payer"),
    [
        (50 * (SMALL + LARGE), 50, "tenant"),
        (12 * (SMALL + LARGE), 50, "tenant"),
        (SMALL, 1, "tenant"),
        (50 * SMALL, 50, "operator"),
    ],
    ids=["ample", "tight", "only the request", "operator"],
)
async def test_the_sum_never_overruns_a_hard_budget(
    broker: redis.Redis,
    gateway: Any,
    budget: Any,
    key: ApiKeySnapshot,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    requests: int,
    payer: Payer,
) -> None:
    for model, prices in (("small", ("1", "2")), ("large", ("10", "20"))):
        await sync_to_async(rate_card)(model, uncached=prices[0], cache_read=prices[0], output=prices[1])
    made = await sync_to_async(budget)(amount=limit)
    monkeypatch.setattr(shadows_module, "MAX_SHADOWS", 100)
    workers, local_gateway = ShadowWorkers(broker), await gateway()
    service = make_service(broker, workers, local_gateway)
    compared: list[ShadowRecord] = []
    log = SimpleNamespace(add_shadow=compared.append)
    shadows = make_shadows(service, workers, log, payer, local_gateway.budget_admission.prices)
    key = with_policy(key, POLICY)

    results = await asyncio.gather(*(run(service, key, number) for number in range(requests)))
    await finish(shadows)
    await service.drain()

    answered = [active for active in results if isinstance(active, ActiveRequest)]
    assert set(results) - set(answered) <= {"budget_exceeded"}
    shadowed = [row for row in compared if not row.code]
    assert {row.code for row in compared} <= {"", "budget_exceeded"}
    events = [*workers.usage, *await not_started(broker)]
    names = [(event.billing_context.request_id, event.billing_context.execution) for event in events]
    assert len(names) == len(set(names))
    await sync_to_async(settle_events)(*events)
    await sync_to_async(settle_events)(*events)  # delivered twice
    used = (await sync_to_async(budget_period)(made)).used
    paid = len(shadowed) if payer == "tenant" else 0
    assert used == (len(answered) * SMALL + paid * LARGE) * 10**6 <= limit * 10**6
    billed = [event.request_id for event in await sync_to_async(unscoped(UsageEvent).all)() if event.cost_femto]
    assert sum(name.endswith(".s") for name in billed) == paid
    booked = await sync_to_async(unscoped(ExecutionCost).all)()
    assert len(booked) == len(shadowed) - paid
    assert all((row.uncached, row.output, row.tenant_id) == (PROMPT, 500, key.tenant_id) for row in booked)
    assert all((row.cost_femto, row.shadow_cost_femto) == (str(SMALL * 10**6), str(LARGE * 10**6)) for row in shadowed)
    if limit == SMALL:
        assert (len(answered), shadowed) == (1, [])
        assert recorded(answered[0])["not_shadowing"] == "budget_exceeded"
    elif limit == 12 * (SMALL + LARGE):
        assert 1 <= len(shadowed) < len(answered)
    else:
        assert len(shadowed) == len(answered) == requests
    await sync_to_async(check_invariants)()


@pytest.mark.parametrize("is_operator_paid", [True, False])
async def test_the_operators_check_uses_no_budget_and_no_credential_of_the_tenant(
    broker: redis.Redis, gateway: Any, budget: Any, key: ApiKeySnapshot, is_operator_paid: bool
) -> None:
    """The tenant's own check is paid from its budget, with its credential."""
    await sync_to_async(rate_card)("small", uncached="1", cache_read="1", output="2")
    await sync_to_async(budget)(amount=0 if is_operator_paid else SMALL)
    workers, local_gateway = ShadowWorkers(broker), await gateway()
    admission = make_service(broker, workers, local_gateway)._starter._admission
    executions = SideExecutions(admission, workers, InferenceJobBuilder(GATEWAY, "secret", 60))
    key = msgspec.structs.replace(key, credentials={"small": 99})
    request, prompt = InferenceRequest("small", [1] * PROMPT, SamplingParams(), 500), Prompt([1] * PROMPT)
    spec = ResponseSpec("shadow", "req_1.v", "small", 0, PROMPT)
    execution, _ = await executions.run(
        "req_1.v", key, request, prompt, MODELS["small"], spec, DecisionRecord(), is_operator_paid=is_operator_paid
    )
    assert execution.admitted.demand.key.credentials == ({} if is_operator_paid else key.credentials)
    assert execution.job.billing_context.lease_id is None or not is_operator_paid
    await sync_to_async(settle_events)(*workers.usage)
    used = [row.used for row in await sync_to_async(lambda: list(unscoped(BudgetPeriod).all()))()]
    assert used == ([] if is_operator_paid else [SMALL * 10**6])  # a period is created by its first reservation
    billed = await sync_to_async(unscoped(UsageEvent).count)()
    booked = await sync_to_async(unscoped(ExecutionCost).count)()
    assert (billed, booked) == ((0, 1) if is_operator_paid else (1, 0))
    await sync_to_async(check_invariants)()


def operator_paid(usage: ExecutionUsage) -> ExecutionUsage:
    context = msgspec.structs.replace(usage.billing_context, is_operator_paid=True, request_id="req_1.s")
    return msgspec.structs.replace(usage, billing_context=context)


async def test_costs_of_the_operator_are_booked_once_and_are_on_no_invoice(event: Any) -> None:
    usage = operator_paid(event(uncached=1000, output=200))
    failed = msgspec.structs.replace(usage, outcome="failed", usage=TokenCounts())
    impossible = msgspec.structs.replace(
        usage,
        usage=TokenCounts(uncached=2**40),
        billing_context=msgspec.structs.replace(usage.billing_context, execution=1),
    )
    result = await sync_to_async(settle_events)(usage, event(), usage, failed, impossible)
    await sync_to_async(settle_events)(usage)
    assert result.quarantined == 1
    (row,) = await sync_to_async(unscoped(ExecutionCost).all)()
    assert (row.request_id, row.uncached, row.output) == ("req_1.s", 1000, 200)
    (other,) = await sync_to_async(unscoped(UsageEvent).all)()
    assert other.request_id != "req_1.s"


# The request and its shadow on replicas.


class Log(RequestLogWriter):
    """The request log of a gateway in the tests' database."""

    def __init__(self, gate: Gate) -> None:
        name = connection.settings_dict["NAME"]
        self.pool = TenantConnectionPool(make_conninfo(platform_settings().database_url, dbname=name))
        super().__init__(self.pool, GATEWAY, GatewayMetrics(gate.dispatcher.replicas))

    async def rows(self) -> list[ShadowComparison]:
        await self.flush()
        found: list[ShadowComparison] = await sync_to_async(unscoped(ShadowComparison).all)()
        return found


@pytest_asyncio.fixture
async def log(gate: Gate) -> AsyncIterator[Log]:
    log = Log(gate)
    await log.pool.open()
    yield log
    await log.pool.close()
    await sync_to_async(lambda: connection.close())()


@pytest.fixture
def shadows(gate: Gate, log: Log) -> Shadows:
    return make_shadows(gate.service, gate.dispatcher, log)


KEY = make_key(mine=SHADOWED)


async def answer(gate: Gate, replica: Replica, call: ActiveRequest, text: str = "yes", tokens: int = 3) -> list[Any]:
    """Compute the request's answer, and read it to its end."""
    await eventually_async(partial(replica.claim, call.request_id))
    counts = TokenCounts(uncached=10, output=tokens)
    await replica.send(
        Tokens(call.request_id, 1, 0, [5], text, prompt=TokenCounts(uncached=10)),
        End(call.request_id, 1, 1, "stop", None, counts),
    )
    async with asyncio.timeout(30):
        events = [event async for event in gate.service.events(call)]
    gate.service.release(call)
    while gate.service._background:
        await asyncio.gather(*gate.service._background)
    return events


async def compute_shadow(replica: Replica, name: str, text: str) -> None:
    await eventually_async(partial(replica.claim, name))
    await replica.send(
        Tokens(name, 1, 0, [5], text, prompt=TokenCounts(uncached=10)),
        End(name, 1, 1, "stop", None, TokenCounts(uncached=10, output=7)),
    )


async def test_a_request_does_not_wait_for_its_shadow(
    gate: Gate, a: Replica, b: Replica, log: Log, shadows: Shadows
) -> None:
    call = await gate.begin(KEY, "mine")
    events = await answer(gate, a, call)  # no replica has claimed the shadow
    assert [event.text for event in events if isinstance(event, Tokens)] == ["yes"]
    assert recorded(call)["shadow"] == {"model": "b"}
    assert "shadow" in await gate.decision_record(call)
    assert await log.rows() == []
    await compute_shadow(b, f"{call.request_id}.s", "")
    await finish(shadows)
    (row,) = await log.rows()
    assert (row.tenant_id, row.requested_model, row.policy_version) == (1, "mine", 3)
    assert (row.served_model, row.shadow_model, row.code, row.is_operator_paid) == ("a", "b", "", False)
    assert (row.output_tokens, row.shadow_output_tokens) == (3, 7)
    assert (row.has_schema, row.failure, row.shadow_failure) == (False, "", "empty")
    assert None not in (row.ttft_ms, row.shadow_ttft_ms, row.total_ms, row.shadow_total_ms)
    assert gate.dispatcher.executions == {}


async def test_a_shadow_that_fails_is_recorded_and_fails_nothing(
    gate: Gate, a: Replica, b: Replica, log: Log, shadows: Shadows
) -> None:
    call = await gate.begin(KEY, "mine")
    name = f"{call.request_id}.s"
    await eventually_async(partial(b.claim, name))
    await b.send(Failed(name, 1, 0, "internal_error", ""))
    events = await answer(gate, a, call)
    assert isinstance(events[-1], End)
    await finish(shadows)
    (row,) = await log.rows()
    assert (row.code, row.shadow_output_tokens) == ("internal_error", None)
    assert (await gate.decision_record(call))["not_shadowing"] == "internal_error"


@pytest.mark.parametrize("sees_load", [True, False])
async def test_a_shadow_is_dropped_if_no_replica_has_a_free_slot(
    gate: Gate,
    a: Replica,
    b: Replica,
    log: Log,
    shadows: Shadows,
    monkeypatch: pytest.MonkeyPatch,
    sees_load: bool,
) -> None:
    b.running = 20
    gate.dispatcher.queue_seconds = 600.0  # so that a shadow that waits in the queue fails the test

    async def is_full() -> bool:
        return (gate.dispatcher.relative_load("b") or 0) > 2

    await eventually_async(is_full)
    if not sees_load:  # the slots are taken between the check and the dispatch
        monkeypatch.setattr(gate.dispatcher, "relative_load", lambda key: 0.0)
    call = await gate.begin(KEY, "mine")
    assert isinstance((await answer(gate, a, call))[-1], End)
    await finish(shadows)
    assert recorded(call)["not_shadowing"] == OVERLOADED
    assert gate.dispatcher.executions == {}
    assert len(gate.dispatcher._queue("b", batch=False)) == 0
    assert [row.code for row in await log.rows()] == [] if sees_load else [OVERLOADED]


async def test_the_number_of_shadows_is_bounded(
    gate: Gate, a: Replica, b: Replica, shadows: Shadows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadows_module, "MAX_SHADOWS", 1)
    first, second = await gate.begin(KEY, "mine"), await gate.begin(KEY, "mine")
    assert "shadow" in recorded(first)
    assert recorded(second)["not_shadowing"] == "too_many_shadows"
    for call in (first, second):
        await answer(gate, a, call)


async def test_no_tenant_uses_all_shadows(gate: Gate, a: Replica, b: Replica, shadows: Shadows) -> None:
    """Tenants that send more than a gateway can shadow, one after the other, until no slot is free."""
    calls, shares = [], []
    for tenant in (1, 2, 3, 4, 5):
        key = msgspec.structs.replace(KEY, tenant_id=tenant)
        sent = [await gate.begin(key, "mine") for _ in range(6 if tenant == 1 else 3)]
        shares.append(sum("shadow" in recorded(call) for call in sent))
        dropped = {recorded(call).get("not_shadowing", "") for call in sent[shares[-1] :]}
        assert dropped == {"too_many_shadows"}
        calls += sent
    assert shares == [4, 2, 1, 1, 0]
    assert len(shadows._running) == shadows_module.MAX_SHADOWS
    await shadows.stop()
    for call in calls:
        gate.service.release(call)


async def test_the_shadow_of_an_aborted_request_is_cancelled(
    gate: Gate, a: Replica, b: Replica, log: Log, shadows: Shadows
) -> None:
    async with gate.broker.pubsub() as control:
        await control.subscribe(control_channel("rb"))
        await control.get_message(timeout=60)
        call = await gate.begin(KEY, "mine")
        name = f"{call.request_id}.s"
        await eventually_async(partial(b.claim, name))

        async def is_claimed() -> bool:
            return gate.dispatcher.executions[name].owner is not None

        await eventually_async(is_claimed)
        gate.service.release(call)
        await asyncio.gather(*shadows._running, return_exceptions=True)
        assert await control.get_message(timeout=60) is not None  # the replica is asked to stop
    assert await log.rows() == []


@pytest.mark.parametrize("payer", ["tenant", "operator"])
async def test_a_failed_request_does_not_bill_a_shadow_that_has_answered(
    gate: Gate, a: Replica, b: Replica, log: Log, payer: Payer
) -> None:
    """The operator's own shadow stays booked, since it has run."""
    shadows = make_shadows(gate.service, gate.dispatcher, log, payer)
    call = await gate.begin(KEY, "mine")
    name, shadow = f"{call.request_id}.s", find_opened(call, "shadows")
    await compute_shadow(b, name, "yes")
    await eventually_async(lambda: shadow.execution is not None and shadow.execution.usage is not None)
    await eventually_async(partial(a.claim, call.request_id))
    await a.send(Failed(call.request_id, 1, 0, "internal_error", ""))
    with pytest.raises(ApiError):
        [event async for event in gate.service.events(call)]
    gate.service.release(call)
    await gate.service.drain()
    entries = [decode_usage(fields[b"e"]) for _, fields in await gate.broker.xrange(USAGE_STREAM)]
    failed = [entry.billing_context.request_id for entry in entries if entry.outcome == "failed"]
    assert failed == [name] * (payer == "tenant")
    assert (shadows._running, await log.rows()) == ({}, [])


async def test_a_killed_gateway_leaves_one_usage_event_of_the_shadow(
    gate: Gate, a: Replica, b: Replica, shadows: Shadows, key: ApiKeySnapshot
) -> None:
    context = msgspec.structs.replace(key, policies=KEY.policies)
    call = await gate.begin(context, "mine")
    name = f"{call.request_id}.s"
    await eventually_async(partial(b.claim, name))
    job = gate.dispatcher.executions[name].job
    # The gateway learns nothing more of the shadow. Its worker reports the usage, again after its own restart.
    usage = ExecutionUsage(job.billing_context, 1, "completed", "stop", TokenCounts(uncached=10, output=7), "rb", 32)
    await gate.broker.xadd(USAGE_STREAM, {"e": encode(usage)})
    await gate.broker.xadd(USAGE_STREAM, {"e": encode(usage)})
    await answer(gate, a, call)
    entries = await gate.broker.xrange(USAGE_STREAM)
    await sync_to_async(settle_events)(*(fields[b"e"] for _, fields in entries))
    assert {decode_usage(fields[b"e"]).billing_context.request_id for _, fields in entries} == {name}
    (event,) = await sync_to_async(unscoped(UsageEvent).all)()
    assert (event.request_id, event.output) == (name, 7)


async def test_shadows_that_a_policy_does_not_select_do_not_start(gate: Gate, a: Replica, shadows: Shadows) -> None:
    for policy, reason in (
        ({**SHADOWED, "shadow": {"model": "a", "percent": 100}}, "same_model"),
        ({**SHADOWED, "shadow": {"model": "gone", "percent": 100}}, "model_not_found"),
        (SHADOWED, "model_loading"),
        ({"rules": SHADOWED["rules"]}, None),
    ):
        call = await gate.begin(make_key(mine=policy), "mine")
        assert shadows._running == {}
        assert recorded(call).get("not_shadowing") == reason
        await answer(gate, a, call)


async def test_an_error_of_the_shadow_does_not_reach_the_request(
    gate: Gate, a: Replica, b: Replica, shadows: Shadows, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> float:
        raise RuntimeError("broken")

    monkeypatch.setattr(gate.dispatcher, "relative_load", fail)
    call = await gate.begin(KEY, "mine")
    assert isinstance((await answer(gate, a, call))[-1], End)


def test_the_share_of_selected_requests() -> None:
    names = [f"req_{number}" for number in range(10_000)]
    assert abs(sum(is_selected(name, 5) for name in names) - 500) < 100
    assert all(is_selected(name, 100) for name in names)
