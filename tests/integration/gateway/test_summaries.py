"""Summaries of long conversations under a hard budget: the sum is reserved first, and each execution is billed once."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import pytest
import redis.asyncio as redis
from asgiref.sync import sync_to_async

from inference_worker.contract.messages import End, ExecutionUsage, Failed, Tokens
from inference_worker.contract.request import SamplingParams, TokenCounts
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import OVERLOADED, ApiError
from millrace.gateway.core.types import InferenceRequest, Prompt
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.execution_state import ExecutionState
from millrace.gateway.lifecycle import tokenizer
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.service import InferenceService
from millrace.gateway.protocols import context_overflow, prompts
from millrace.gateway.protocols.openai import completions
from tenants.keys.snapshot import ApiKeySnapshot
from tests.support.billing.books import rate_card
from tests.support.gateway import escalations
from tests.support.gateway.budgets import budget_period, check_invariants, settle_events
from tests.support.gateway.escalations import Workers, make_service, not_started, with_policy
from tests.support.gateway.services import find_opened, find_stage, recorded

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table", "one_token_per_letter")]
MODELS = {
    name: ServedModel(name, None, context, 1000, 0)  # type: ignore[arg-type]
    for name, context in (("cheap", 4000), ("large", 2000))
}
OUTPUT = 100
POLICY = {"rules": [{"targets": [{"model": "large"}]}], "context_overflow": "summarize", "summarizer": "cheap"}
CONVERSATION = [("system", 100), ("user", 900), ("assistant", 700), ("user", 300)]


class SummaryWorkers(Workers):
    """A dispatcher that answers immediately. Summaries can fail or be empty, and answers can fail."""

    def __init__(self, broker: redis.Redis, summary: str | None = "they met", answer: str | None = "answer") -> None:
        super().__init__(broker)
        self.summary, self.answer = summary, answer
        self.is_lost = False  # the stream of a summary that has completed
        self.prompts: dict[str, list[int]] = {}

    def submit(self, execution: Execution) -> None:
        context, attempt = execution.job.billing_context, execution.attempt
        self.prompts[context.request_id] = execution.job.prompt_token_ids
        text = self.summary if context.model == "cheap" else self.answer
        execution.advance(ExecutionState.ENDED)
        counts = TokenCounts(len(execution.job.prompt_token_ids), output=10)
        state = "completed" if text is not None else "failed"
        self.usage.append(ExecutionUsage(context, attempt, state, "stop", counts, "r", 0))
        if self.is_lost and context.model == "cheap":
            execution.buffer.put(Failed(context.request_id, attempt, 0, "stream_lost", ""))
            return
        if text is None:
            execution.buffer.put(Failed(context.request_id, attempt, 0, "internal_error", ""))
            return
        execution.buffer.put(Tokens(context.request_id, attempt, 0, [1], text))
        execution.buffer.put(End(context.request_id, attempt, 1, "stop", None, counts))


@pytest.fixture
def one_token_per_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenize(model: ServedModel, request: InferenceRequest, max_tokens: int | None = None) -> Prompt:
        return Prompt([ord(letter) for message in request.prompt for letter in message["content"]])

    monkeypatch.setattr(escalations, "MODELS", MODELS)
    monkeypatch.setattr(context_overflow, "tokenize_here", tokenize)
    monkeypatch.setattr(prompts, "tokenize_here", tokenize)
    monkeypatch.setattr(tokenizer, "is_short", lambda _: True)


def conversation() -> list[dict[str, str]]:
    return [{"role": role, "content": role[0] * length} for role, length in CONVERSATION]


async def run(
    service: InferenceService, key: ApiKeySnapshot, number: int, params: SamplingParams | None = None, **fields: Any
) -> ActiveRequest | str:
    try:
        request = InferenceRequest("mine", conversation(), params or SamplingParams(), OUTPUT, **fields)
        active = await service.begin(key, request, completions.DIALECT, f"req_{number}")
    except ApiError as exc:
        return exc.code
    events = [event async for event in service.events(active)]
    service.release(active)
    assert isinstance(events[-1], End)
    return active


def summary_of(active: ActiveRequest) -> str:
    """Return the summary of the messages that a request has dropped."""
    return str(find_opened(active, "summaries").summary)


async def prices() -> None:
    for model, price in (("cheap", "1"), ("large", "10")):
        hit = {"answer_hit_input": "1", "answer_hit_output": "1"}
        await sync_to_async(rate_card)(model, uncached=price, cache_read=price, output=price, **hit)


@pytest.mark.parametrize(("requests", "limit"), [(1, 10**9), (50, 120_000_000), (1, 9_000_000)])
async def test_the_sum_is_reserved_first_and_never_overruns_a_budget(
    broker: redis.Redis, gateway: Any, budget: Any, key: ApiKeySnapshot, requests: int, limit: int
) -> None:
    await prices()
    made = await sync_to_async(budget)(amount=limit)
    workers = SummaryWorkers(broker)
    service = make_service(broker, workers, await gateway())
    key = with_policy(key, POLICY)

    results = await asyncio.gather(*(run(service, key, number) for number in range(requests)))
    await service.drain()

    answered = [active for active in results if isinstance(active, ActiveRequest)]
    assert answered
    assert set(results) - set(answered) <= {"budget_exceeded"}
    events = [*workers.usage, *await not_started(broker)]
    names = [(event.billing_context.request_id, event.billing_context.execution) for event in events]
    assert len(names) == len(set(names))  # each execution is billed once
    await sync_to_async(settle_events)(*events)
    used = (await sync_to_async(budget_period)(made)).used
    assert 0 < used <= limit * 10**6
    summarized = [active for active in answered if summary_of(active)]
    spent = sum(
        (1 if event.billing_context.model == "cheap" else 10) * (event.usage.uncached + event.usage.output) * 10**9
        for event in workers.usage
    )
    assert used == spent
    assert len(workers.usage) == len(answered) + len(summarized)
    for active in answered:
        text = "".join(map(chr, workers.prompts[active.request_id]))
        assert text.startswith("s" * 100)
        assert text.endswith("u" * 300)
        assert ("[Summary of earlier messages: they met]" in text) == bool(summary_of(active))
        assert recorded(active)["dropped_messages"] == 2
        assert len(text) + OUTPUT <= 2000
        if summary_of(active):
            assert recorded(active)["summary"]["model"] == "cheap"
            asked = "".join(map(chr, workers.prompts[f"{active.request_id}.0"]))
            assert "user: uuu" in asked
            assert "assistant: aaa" in asked
        else:
            assert recorded(active)["not_summarizing"] == "budget_exceeded"
    assert bool(summarized) == (limit != 9_000_000)
    await sync_to_async(check_invariants)()


@pytest.mark.parametrize(
    ("summary", "policy", "reason"),
    [
        (None, POLICY, "internal_error"),
        ("", POLICY, "empty"),
        ("x", {**POLICY, "summarizer": "gone"}, "model_not_found"),
        ("x" * 2000, POLICY, None),
    ],
)
async def test_without_a_summary_the_messages_are_dropped(
    broker: redis.Redis, gateway: Any, budget: Any, key: ApiKeySnapshot, summary: str, policy: Any, reason: str | None
) -> None:
    await prices()
    await sync_to_async(budget)(amount=10**9)
    workers = SummaryWorkers(broker, summary)
    service = make_service(broker, workers, await gateway())
    active = await run(service, with_policy(key, policy), 1)
    await service.drain()
    assert isinstance(active, ActiveRequest)
    assert recorded(active).get("not_summarizing") == reason
    assert "".join(map(chr, workers.prompts["req_1"])) == "s" * 100 + "u" * 300
    await sync_to_async(settle_events)(*workers.usage, *await not_started(broker))
    await sync_to_async(check_invariants)()


async def test_a_summary_whose_stream_is_lost_is_not_billed(
    broker: redis.Redis, gateway: Any, budget: Any, key: ApiKeySnapshot
) -> None:
    await prices()
    made = await sync_to_async(budget)(amount=10**9)
    workers = SummaryWorkers(broker)
    workers.is_lost = True
    service = make_service(broker, workers, await gateway())
    active = await run(service, with_policy(key, POLICY), 1)
    await service.drain()
    assert isinstance(active, ActiveRequest)
    assert recorded(active)["not_summarizing"] == "stream_lost"
    await sync_to_async(settle_events)(*workers.usage, *await not_started(broker))
    answer = workers.usage[-1]
    assert answer.billing_context.request_id == "req_1"
    used = (await sync_to_async(budget_period)(made)).used
    assert used == 10 * (answer.usage.uncached + answer.usage.output) * 10**9
    await sync_to_async(check_invariants)()


async def test_a_summary_of_a_request_that_fails_is_not_billed(
    broker: redis.Redis, gateway: Any, budget: Any, key: ApiKeySnapshot
) -> None:
    await prices()
    made = await sync_to_async(budget)(amount=10**9)
    workers = SummaryWorkers(broker, answer=None)
    service = make_service(broker, workers, await gateway())
    request = InferenceRequest("mine", conversation(), SamplingParams(), OUTPUT)
    active = await service.begin(with_policy(key, POLICY), request, completions.DIALECT, "req_1")
    with pytest.raises(ApiError):
        [event async for event in service.events(active)]
    service.release(active)
    await service.drain()
    assert summary_of(active) == "they met"
    await sync_to_async(settle_events)(*workers.usage, *await not_started(broker))
    assert (await sync_to_async(budget_period)(made)).used == 0
    await sync_to_async(check_invariants)()


@pytest.mark.parametrize(
    ("directives", "code"), [(frozenset(), OVERLOADED), (frozenset({"only-if-cached"}), "not_cached")]
)
async def test_a_request_that_only_the_cache_can_answer_is_not_summarized(
    broker: redis.Redis,
    gateway: Any,
    budget: Any,
    key: ApiKeySnapshot,
    monkeypatch: pytest.MonkeyPatch,
    directives: frozenset[str],
    code: str,
) -> None:
    await prices()
    await sync_to_async(budget)(amount=10**9)
    workers = SummaryWorkers(broker)
    service = make_service(broker, workers, await gateway())

    def require_capacity(key: str, tenant: int, weight: float = 1.0, *, batch: bool = False) -> None:
        if code == OVERLOADED and key == MODELS["large"].key:
            raise ApiError(OVERLOADED, "")

    monkeypatch.setattr(workers, "require_capacity", require_capacity)
    key = msgspec.structs.replace(with_policy(key, POLICY), answer_cache_seconds=60)
    request = InferenceRequest("mine", conversation(), SamplingParams(), OUTPUT, cache_directives=directives)
    with pytest.raises(ApiError) as rejection:
        await service.begin(key, request, completions.DIALECT, "req_1")
    await service.drain()
    assert rejection.value.code == code
    assert workers.usage == []
    await sync_to_async(settle_events)(*await not_started(broker))
    await sync_to_async(check_invariants)()


async def test_a_cached_answer_makes_a_summary_unnecessary(
    broker: redis.Redis, gateway: Any, budget: Any, key: ApiKeySnapshot
) -> None:
    await prices()
    made = await sync_to_async(budget)(amount=10**9)
    workers = SummaryWorkers(broker)
    service = make_service(broker, workers, local := await gateway())
    key = msgspec.structs.replace(with_policy(key, POLICY), answer_cache_seconds=60)
    greedy = SamplingParams(temperature=0.0)

    first = await run(service, key, 1, greedy)
    await asyncio.gather(*service._background)
    others = [
        await run(service, key, 2, greedy),
        await run(service, key, 3, greedy, cache_directives=frozenset({"only-if-cached"})),
    ]
    await service.drain()

    assert isinstance(first, ActiveRequest)
    assert summary_of(first)
    assert len(workers.usage) == 2  # the summary and the answer
    for other in others:
        assert isinstance(other, ActiveRequest)
        assert (summary_of(other), other.execution.cache_layer) == ("", "exact")
        assert recorded(other)["dropped_messages"] == 2
        assert "not_summarizing" not in recorded(other)
    hits = await not_started(broker)
    assert [event.usage.answer_hit_output for event in hits] == [10, 10]
    await local.budget_admission.stop()
    await sync_to_async(settle_events)(*workers.usage, *hits)
    assert (await sync_to_async(budget_period)(made)).reserved == 0
    await sync_to_async(check_invariants)()


async def test_a_conversation_with_other_dropped_messages_is_not_served_from_the_cache(
    broker: redis.Redis, gateway: Any, budget: Any, key: ApiKeySnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    await prices()
    await sync_to_async(budget)(amount=10**9)
    workers = SummaryWorkers(broker)
    service = make_service(broker, workers, await gateway())
    key = msgspec.structs.replace(with_policy(key, POLICY), answer_cache_seconds=60)
    greedy = SamplingParams(temperature=0.0)
    await run(service, key, 1, greedy)
    await asyncio.gather(*service._background)
    changed = [*CONVERSATION[:2], ("assistant", 701), CONVERSATION[3]]
    monkeypatch.setattr(f"{__name__}.CONVERSATION", changed)
    other = await run(service, key, 2, greedy)
    await service.drain()
    assert isinstance(other, ActiveRequest)
    assert recorded(other)["dropped_messages"] == 2
    assert (summary_of(other), other.execution.cache_layer) == ("they met", "computed")


async def test_an_answer_without_its_summary_is_not_cached(
    broker: redis.Redis, gateway: Any, budget: Any, key: ApiKeySnapshot
) -> None:
    await prices()
    await sync_to_async(budget)(amount=10**9)
    workers = SummaryWorkers(broker, summary=None)
    service = make_service(broker, workers, await gateway())
    key = msgspec.structs.replace(with_policy(key, POLICY), answer_cache_seconds=60)
    greedy = SamplingParams(temperature=0.0)
    await run(service, key, 1, greedy)
    await asyncio.gather(*service._background)
    workers.summary = "they met"
    second = await run(service, key, 2, greedy)
    await service.drain()
    assert isinstance(second, ActiveRequest)
    assert summary_of(second) == "they met"
    await sync_to_async(settle_events)(*workers.usage, *await not_started(broker))
    await sync_to_async(check_invariants)()


async def test_a_disconnect_during_the_summary_returns_what_was_reserved_for_escalations(
    broker: redis.Redis, gateway: Any, budget: Any, key: ApiKeySnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    await prices()
    await sync_to_async(rate_card)("other", uncached="10", cache_read="10", output="10")
    made = await sync_to_async(budget)(amount=10**9)
    workers = SummaryWorkers(broker)
    service = make_service(broker, workers, local := await gateway())
    rule = {"targets": [{"model": "large"}, {"model": "other"}], "strategy": "ordered", "escalate": {"on": ["empty"]}}
    monkeypatch.setitem(MODELS, "other", dataclasses.replace(MODELS["large"], name="other"))
    key = with_policy(key, {**POLICY, "rules": [rule], "fallback_on": ["error"]})
    started = asyncio.Event()

    async def summarize(active: ActiveRequest, model: ServedModel, dropped: int) -> str:
        assert find_opened(active, "escalation").reserved
        started.set()
        await asyncio.sleep(60)
        return ""

    monkeypatch.setattr(find_stage(service, "summaries"), "summarize", summarize)
    running = asyncio.create_task(run(service, key, 1))
    async with asyncio.timeout(30):
        await started.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await service.drain()
    assert workers.usage == []
    await local.budget_admission.stop()
    await sync_to_async(settle_events)(*await not_started(broker))
    assert (await sync_to_async(budget_period)(made)).reserved == 0
