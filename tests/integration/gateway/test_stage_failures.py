"""Internal errors of stages: each stage fails at each of its hooks, before or after its work.

All stages are enabled. Whatever fails, the request ends once, each execution is billed at most once, and nothing stays
reserved.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
import redis.asyncio as redis
from asgiref.sync import sync_to_async

from billing.models import BudgetPeriod
from inference_worker.contract.messages import AnswerEvent, End, ExecutionUsage, Tokens
from inference_worker.contract.request import SamplingParams, TokenCounts
from millrace.gateway import assembly
from millrace.gateway.admission.budget_admission import RequestAdmission
from millrace.gateway.answer_cache.answer_cache import AnswerCache
from millrace.gateway.answer_cache.answer_store import AnswerStore, CachedAnswer
from millrace.gateway.answer_cache.semantic_cache import Question
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, LastTurn, Prompt
from millrace.gateway.dispatch.execution import Execution
from millrace.gateway.dispatch.execution_state import ExecutionState
from millrace.gateway.lifecycle import tokenizer
from millrace.gateway.lifecycle.active_request import ActiveRequest
from millrace.gateway.lifecycle.service import InferenceService
from millrace.gateway.lifecycle.stage import LAST, RequestStage
from millrace.gateway.protocols import context_overflow, prompts
from millrace.gateway.protocols.openai import completions
from millrace.gateway.routing.router import Router
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.routing_policies.experiments import ExperimentArm, RunningExperiment
from tenants.routing_policies.policy import parse
from tests.support.billing.books import rate_card
from tests.support.gateway.budgets import budget_period, check_invariants, settle_events
from tests.support.gateway.escalations import Workers, not_started
from tests.support.gateway.services import find_stage, make_parts, recorded
from tests.support.rows import unscoped

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("table", "one_token_per_letter")]
PRICES = {"cheap": 1, "small": 2, "large": 10, "shadow": 5}  # USD of a million tokens of any class
HIT_PRICE = 1
MODELS = {
    name: ServedModel(name, None, context, 1000, 0)  # type: ignore[arg-type]
    for name, context in (("cheap", 4000), ("small", 2000), ("large", 2000), ("shadow", 4000))
}
TEXTS = {"cheap": "they met", "small": "bad", "large": "good", "shadow": "other"}
OUTPUT = 100
GENERATED = 10  # tokens of each answer
POLICY = {
    "rules": [
        {
            "targets": [{"model": "small"}, {"model": "large"}],
            "strategy": "ordered",
            "escalate": {"on": ["pattern"], "pattern": "good.*"},
        }
    ],
    "fallback_on": ["error"],
    "context_overflow": "summarize",
    "summarizer": "cheap",
    "shadow": {"model": "shadow", "percent": 100},
    "semantic_cache": True,
}
EXPERIMENT = RunningExperiment(7, "key", "00", (ExperimentArm("control", 100),))
CONVERSATION = [("system", 100), ("user", 900), ("assistant", 700), ("user", 300)]
SUMMARY, SMALL, LARGE, SHADOW, CHECK = ("req_1.0", 0), ("req_1", 0), ("req_1", 1), ("req_1.s", 0), ("req_1.v", 0)
ALL = {SUMMARY, SMALL, LARGE, SHADOW}


class StageWorkers(Workers):
    """A dispatcher whose executions answer immediately, and whose replicas are idle."""

    def relative_load(self, key: str) -> float | None:
        return 0.0

    def submit(self, execution: Execution) -> None:
        context, attempt = execution.job.billing_context, execution.attempt
        counts = TokenCounts(len(execution.job.prompt_token_ids), output=GENERATED)
        self.usage.append(ExecutionUsage(context, attempt, "completed", "stop", counts, "r", 0))
        assert execution.advance(ExecutionState.ENDED)
        execution.buffer.put(Tokens(context.request_id, attempt, 0, [1], TEXTS[context.model]))
        execution.buffer.put(End(context.request_id, attempt, 1, "stop", None, counts))


class FakeSemanticCache:
    """A semantic cache that serves one answer to each question, or none."""

    def __init__(self, *, is_hit: bool) -> None:
        self.is_hit = is_hit
        self.checked: list[str] = []
        self.discarded = 0

    def begin(self, key: ApiKeySnapshot, request: InferenceRequest, request_id: str) -> Question:
        vector = asyncio.create_task(asyncio.sleep(0))
        return Question(key, request_id, LastTurn("q", b""), "e", 3, vector, [])

    async def find(self, execution: Execution, question: Question) -> CachedAnswer | None:
        if not self.is_hit:
            return None
        question.is_hit = question.is_verified = True
        question.note["similarity"] = 0.99
        usage = TokenCounts(uncached=20, output=GENERATED)
        events: list[AnswerEvent] = [Tokens("req_0", 1, 0, [1], "good hit"), End("req_0", 1, 1, "stop", None, usage)]
        return CachedAnswer("req_0", int(time.time()), events)

    async def record(self, *args: Any, **_: Any) -> None:
        request_id = args[3]
        if request_id.endswith(".v"):
            self.checked.append(request_id)

    async def discard(self, question: Question) -> None:
        self.discarded += 1

    async def stop(self) -> None:
        """Stop nothing."""


class Kill:
    """An internal error at a hook of a stage, at its first call."""

    def __init__(self, hook: str, *, is_after: bool) -> None:
        self.hook = hook.removesuffix("_last").removesuffix("_first")
        self.is_last = hook.endswith("_last")
        self.is_after = is_after
        self.calls = 0

    async def run(self, original: Any, *args: Any, **fields: Any) -> Any:
        """Call the hook, or fail before or after it."""
        is_meant = not (self.is_last and not isinstance(args[-1], LAST))
        self.calls += is_meant
        if not is_meant or self.calls > 1:
            return await original(*args, **fields)
        if self.is_after:
            await original(*args, **fields)
        raise RuntimeError("killed")


def install_kill(service: InferenceService, stage: str, kill: Kill) -> None:
    """Let the stages that requests open fail at the hook."""
    target = find_stage(service, stage)
    original_open = target.open

    def open_stage(*args: Any) -> RequestStage | None:
        if kill.hook == "open":
            kill.calls += 1
            raise RuntimeError("killed")
        opened = original_open(*args)
        if opened is not None:
            original = getattr(opened, kill.hook)

            async def hook(*hook_args: Any, **fields: Any) -> Any:
                return await kill.run(original, *hook_args, **fields)

            setattr(opened, kill.hook, hook)
        return opened

    target.open = open_stage


@pytest.fixture
def one_token_per_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenize(model: ServedModel, request: InferenceRequest, max_tokens: int | None = None) -> Prompt:
        return Prompt([ord(letter) for message in request.prompt for letter in message["content"]])

    monkeypatch.setattr(context_overflow, "tokenize_here", tokenize)
    monkeypatch.setattr(prompts, "tokenize_here", tokenize)
    monkeypatch.setattr(tokenizer, "is_short", lambda _: True)


class Fleet:
    """A gateway with all stages, whose executions answer immediately."""

    def __init__(self, broker: redis.Redis, local: Any, *, is_hit: bool) -> None:
        self.broker, self.local = broker, local
        self.workers = StageWorkers(broker)
        self.semantic = FakeSemanticCache(is_hit=is_hit)
        answers = AnswerCache(AnswerStore(broker, "secret", 60), self.workers, self.semantic)  # type: ignore[arg-type]
        admission = RequestAdmission(broker, local.budget_admission)
        self.parts = make_parts(
            broker,
            Router(MODELS),
            admission,
            self.workers,
            answers=answers,
            checks_paid_by="operator",
            prices=local.budget_admission.prices,
        )
        self.service = assembly.make_service(self.parts)

    async def run(self, key: ApiKeySnapshot) -> tuple[ActiveRequest | None, str]:
        """Run a request to its end. Return it with its text, or the code of its error."""
        messages = [{"role": role, "content": role[0] * length} for role, length in CONVERSATION]
        request = InferenceRequest("mine", messages, SamplingParams(temperature=0.0), OUTPUT)
        active = None
        try:
            active = await self.service.begin(key, request, completions.DIALECT, "req_1")
            events = [event async for event in self.service.events(active)]
        except ApiError as exc:
            return active, exc.code
        except RuntimeError:
            if active is not None:
                await self.service.mark_failed(active)
            return active, "internal_error"
        finally:
            if active is not None:
                self.service.release(active)
            await self._settle()
        assert [isinstance(event, End) for event in events].count(True) == 1
        assert isinstance(events[-1], End)
        return active, "".join(event.text for event in events if isinstance(event, Tokens))

    async def _settle(self) -> None:
        """Wait until nothing runs any more, then return all leases."""
        shadows, checks = find_stage(self.service, "shadows"), find_stage(self.service, "semantic_checks")
        async with asyncio.timeout(60):
            await self.parts.background.wait()
            while tasks := [*shadows._running, *checks._running]:
                await asyncio.gather(*tasks, return_exceptions=True)
            await self.service.drain()
        await self.local.budget_admission.stop()

    async def billed(self, budget: int) -> set[tuple[str, int]]:
        """Settle all events. Return the executions that were billed, after checks of their sum."""
        events = [*self.workers.usage, *await not_started(self.broker)]
        await sync_to_async(settle_events)(*events)
        cost: dict[tuple[str, int], int] = {}
        for event in events:
            context, usage = event.billing_context, event.usage
            name = context.request_id, context.execution
            if event.outcome == "failed" or context.is_operator_paid:
                cost.pop(name, None)
            elif name not in cost and event.finish_reason != "never_ran":
                hits = usage.answer_hit_input + usage.answer_hit_output
                cost[name] = (PRICES[context.model] * (usage.uncached + usage.output) + HIT_PRICE * hits) * 10**9
        if cost:
            period = await sync_to_async(budget_period)(budget)
            assert (period.used, period.reserved) == (sum(cost.values()), 0)
        else:  # a period is created by its first reservation
            periods = await sync_to_async(lambda: list(unscoped(BudgetPeriod).all()))()
            assert not any(period.used or period.reserved for period in periods)
        await sync_to_async(check_invariants)()
        return set(cost)


def make_key(key: ApiKeySnapshot) -> ApiKeySnapshot:
    return msgspec.structs.replace(
        key,
        policies={"mine": parse(POLICY, version=1)},
        experiments={"mine": EXPERIMENT},
        answer_cache_seconds=60,
        semantic_cache_max_error_percent=20,
        content_retention_days=1,
    )


async def make_fleet(broker: redis.Redis, gateway: Any, budget: Any, *, is_hit: bool) -> tuple[Fleet, int]:
    for model, price in PRICES.items():
        hit = {"answer_hit_input": str(HIT_PRICE), "answer_hit_output": str(HIT_PRICE)}
        usd = str(price)
        await sync_to_async(rate_card)(model, uncached=usd, cache_read=usd, output=usd, **hit)
    made = await sync_to_async(budget)(amount=10**9)
    return Fleet(broker, await gateway(), is_hit=is_hit), made


WITHOUT_SUMMARY, WITHOUT_SHADOW, WITHOUT_ESCALATION = ALL - {SUMMARY}, ALL - {SHADOW}, ALL - {LARGE}
# Stage, hook, whether the hook has done its work -> end of the request (its text or code) and what is billed.
COMPUTED: list[tuple[str, str, bool, str, set[tuple[str, int]]]] = [
    ("experiments", "open", False, "internal_error", set()),
    ("experiments", "before_admission", False, "internal_error", set()),
    ("experiments", "before_admission", True, "internal_error", set()),
    ("experiments", "before_dispatch", False, "internal_error", set()),
    ("experiments", "on_event_last", False, "internal_error", set()),
    ("experiments", "on_close", False, "good", ALL),
    ("escalation", "open", False, "bad", WITHOUT_ESCALATION),
    ("escalation", "before_admission", False, "bad", WITHOUT_ESCALATION),
    ("escalation", "before_admission", True, "bad", WITHOUT_ESCALATION),
    ("escalation", "before_dispatch", False, "bad", WITHOUT_ESCALATION),
    ("escalation", "before_dispatch", True, "bad", WITHOUT_ESCALATION),
    ("escalation", "on_event_first", False, "bad", WITHOUT_ESCALATION),
    ("escalation", "on_event_first", True, "bad", WITHOUT_ESCALATION),
    ("escalation", "on_event_last", False, "bad", WITHOUT_ESCALATION),
    ("escalation", "on_event_last", True, "bad", WITHOUT_ESCALATION),  # the large model has begun
    ("escalation", "on_close", False, "good", ALL),
    ("escalation", "on_close", True, "good", ALL),
    ("answer_cache", "open", False, "good", ALL),
    ("answer_cache", "before_admission", False, "good", ALL),
    ("answer_cache", "before_dispatch", False, "good", ALL),
    ("answer_cache", "before_dispatch", True, "good", ALL),
    ("answer_cache", "on_event_last", False, "good", ALL),
    ("answer_cache", "on_event_last", True, "good", ALL),
    ("answer_cache", "on_close", False, "good", ALL),
    ("semantic_checks", "open", False, "good", ALL),
    ("semantic_checks", "before_admission", False, "good", ALL),
    ("semantic_checks", "before_dispatch", False, "good", ALL),
    ("semantic_checks", "on_event_last", False, "good", ALL),
    ("semantic_checks", "on_close", False, "good", ALL),
    ("summaries", "open", False, "context_length_exceeded", set()),
    ("summaries", "before_admission", False, "context_length_exceeded", set()),
    ("summaries", "before_admission", True, "good", WITHOUT_SUMMARY),
    ("summaries", "before_dispatch", False, "good", WITHOUT_SUMMARY),
    ("summaries", "before_dispatch", True, "good", ALL),
    ("summaries", "on_event_last", False, "good", ALL),
    ("summaries", "on_close", False, "good", ALL),
    ("shadows", "open", False, "good", WITHOUT_SHADOW),
    ("shadows", "before_admission", False, "good", WITHOUT_SHADOW),
    ("shadows", "before_dispatch", False, "good", WITHOUT_SHADOW),
    ("shadows", "before_dispatch", True, "good", WITHOUT_SHADOW),
    ("shadows", "on_event_first", False, "good", WITHOUT_SHADOW),
    ("shadows", "on_event_first", True, "good", WITHOUT_SHADOW),
    ("shadows", "on_close", False, "good", ALL),
]
SERVED: list[tuple[str, str, bool, str, set[tuple[str, int]], bool]] = [
    ("answer_cache", "before_dispatch", False, "good", ALL, False),
    ("answer_cache", "before_dispatch", True, "good hit", {SMALL}, True),
    ("answer_cache", "on_event_last", False, "good hit", {SMALL}, True),
    ("answer_cache", "on_close", False, "good hit", {SMALL}, True),
    ("semantic_checks", "on_event_last", False, "good hit", {SMALL}, False),
    ("semantic_checks", "on_event_last", True, "good hit", {SMALL}, True),
    ("escalation", "on_event_last", False, "good hit", {SMALL}, True),
    ("escalation", "on_event_last", True, "good hit", {SMALL}, True),
    ("summaries", "before_admission", True, "good hit", {SMALL}, True),
]


@pytest.mark.parametrize(("is_hit", "text", "billed"), [(False, "good", ALL), (True, "good hit", {SMALL})])
async def test_a_request_passes_through_all_stages(
    broker: redis.Redis, gateway: Any, budget: Any, key: ApiKeySnapshot, is_hit: bool, text: str, billed: set[Any]
) -> None:
    fleet, made = await make_fleet(broker, gateway, budget, is_hit=is_hit)
    active, end = await fleet.run(make_key(key))
    assert end == text
    assert active is not None
    record = recorded(active)
    assert record["experiment"] == {"id": 7, "arm": 0, "name": "control"}
    assert record["dropped_messages"] == 2
    assert ("escalations" in record, "summary" in record, "shadow" in record) == (not is_hit,) * 3
    assert fleet.semantic.checked == ["req_1.v"] * is_hit
    assert len(fleet.parts.request_log) == (not is_hit)  # type: ignore[arg-type]
    assert await fleet.billed(made) == billed


@pytest.mark.parametrize(("stage", "hook", "is_after", "end", "billed"), COMPUTED)
async def test_a_stage_that_fails_is_skipped_or_fails_the_request(
    broker: redis.Redis,
    gateway: Any,
    budget: Any,
    key: ApiKeySnapshot,
    stage: str,
    hook: str,
    is_after: bool,
    end: str,
    billed: set[tuple[str, int]],
) -> None:
    fleet, made = await make_fleet(broker, gateway, budget, is_hit=False)
    kill = Kill(hook, is_after=is_after)
    install_kill(fleet.service, stage, kill)
    _, found = await fleet.run(make_key(key))
    assert found == end
    assert kill.calls
    failures = fleet.parts.metrics.stage_failures.labels(stage, kill.hook)
    assert failures._value.get() == 1
    assert await fleet.billed(made) == billed


@pytest.mark.parametrize(("stage", "hook", "is_after", "end", "billed", "is_checked"), SERVED)
async def test_a_stage_that_fails_at_a_semantic_hit_is_skipped(
    broker: redis.Redis,
    gateway: Any,
    budget: Any,
    key: ApiKeySnapshot,
    stage: str,
    hook: str,
    is_after: bool,
    end: str,
    billed: set[tuple[str, int]],
    is_checked: bool,
) -> None:
    fleet, made = await make_fleet(broker, gateway, budget, is_hit=True)
    install_kill(fleet.service, stage, Kill(hook, is_after=is_after))
    _, found = await fleet.run(make_key(key))
    assert found == end
    assert await fleet.billed(made) == billed
    assert fleet.semantic.checked == ["req_1.v"] * is_checked
