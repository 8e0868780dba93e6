"""Routing in the gateway: latencies, retry budgets, checks of answers and shortened conversations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from inference_worker.contract.messages import End, Tokens
from inference_worker.contract.request import SamplingParams, StructuredSpec, TokenCounts, ToolCallDelta
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, Prompt, ResponseSpec
from millrace.gateway.protocols import context_overflow
from millrace.gateway.routing.retry_budgets import RetryBudgets
from millrace.gateway.routing.signals import LatencyTracker
from millrace.gateway.stages.answer_checks import failed_check
from tenants.routing_policies.policy import Escalation

POLICY = (1, "mine")
SCHEMA = '{"type": "object", "required": ["a"]}'
MODEL = ServedModel("m", None, 100, 1000, 0)  # type: ignore[arg-type]  # the tokenization is replaced


def test_recent_latencies_weigh_more_and_old_ones_are_forgotten() -> None:
    tracker = LatencyTracker()
    assert tracker.milliseconds("m", now=0) is None
    tracker.record("m", 1.0, now=0)
    tracker.record("m", 0.1, now=120)  # two half-lives later
    assert tracker.milliseconds("m", now=120) == pytest.approx((0.25 * 1.0 + 0.1) / 1.25 * 1000)
    assert tracker.milliseconds("m", now=120 + 600) is None


def test_a_retry_budget_bounds_the_share_of_fallbacks() -> None:
    budgets = RetryBudgets()
    for _ in range(100):
        budgets.record_request(POLICY, now=0)
    assert [budgets.take(POLICY, 10, now=0) for _ in range(11)] == [True] * 10 + [False]
    assert budgets.take((2, "mine"), 10, now=0)  # another tenant's
    assert budgets.take(POLICY, None, now=0)
    assert not budgets.take((3, "mine"), 0, now=0)


def test_a_policy_with_few_requests_may_fall_back() -> None:
    budgets = RetryBudgets()
    assert [budgets.take(POLICY, 1, now=0) for _ in range(4)] == [True, True, True, False]
    assert budgets.take(POLICY, 1, now=60)


def answer(*texts: str, calls: list[ToolCallDelta] | None = None, reason: Any = "stop") -> list[Tokens | End]:
    events: list[Tokens | End] = [
        Tokens("req_1", 1, number, [1], text, index=number, calls=calls or []) for number, text in enumerate(texts)
    ]
    return [*events, End("req_1", 1, len(texts), reason, None, TokenCounts(1, output=1))]


@pytest.mark.parametrize(
    ("on", "texts", "fields", "failed"),
    [
        ("empty", ["  \n"], {}, True),
        ("empty", ["x", ""], {}, True),
        ("empty", ["x"], {}, False),
        ("schema", ['{"a": 1}'], {"structured": StructuredSpec("json_schema", SCHEMA)}, False),
        ("schema", ['{"b": 1}'], {"structured": StructuredSpec("json_schema", SCHEMA)}, True),
        ("schema", ['{"a": '], {"structured": StructuredSpec("json_schema", SCHEMA)}, True),
        ("schema", ["[]"], {"structured": StructuredSpec("json_object")}, True),
        ("schema", ["anything"], {}, False),
        ("pattern", ["yes"], {}, False),
        ("pattern", ["yes", "maybe"], {}, True),
    ],
)
async def test_checks_of_an_answer(on: Any, texts: list[str], fields: dict[str, Any], failed: bool) -> None:
    request = InferenceRequest("m", "p", SamplingParams(n=len(texts)), **fields)
    spec = ResponseSpec("openai.chat", "req_1", "m", 0, 1, n=len(texts))
    escalation = Escalation((on,), "(yes|no)" if on == "pattern" else "")
    assert await failed_check(escalation, request, spec, answer(*texts)) == (on if failed else None)


@pytest.mark.parametrize(("arguments", "failed"), [('{"x": 1}', False), ('{"x": ', True), ("[1]", True), ("", False)])
async def test_arguments_of_tool_calls_are_objects(arguments: str, failed: bool) -> None:
    upstream = ResponseSpec("openai.chat", "req_1", "m", 0, 1, tools=["f"], tool_format="upstream")
    hermes = ResponseSpec("openai.chat", "req_1", "m", 0, 1, tools=["f"])
    request, escalation = InferenceRequest("m", "p", SamplingParams()), Escalation(("tool_arguments", "empty"))
    parsed = answer("", calls=[ToolCallDelta(0, "f", arguments[:3]), ToolCallDelta(0, "", arguments[3:])])
    expected = "tool_arguments" if failed else None
    assert await failed_check(escalation, request, upstream, parsed) == expected
    if arguments == '{"x": ':
        text = '<tool_call>\n{"name": "f", "arguments": {"x": '
        assert await failed_check(escalation, request, hermes, answer(text, reason="length")) == expected


@pytest.fixture
def one_token_per_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenize(model: ServedModel, request: InferenceRequest, max_tokens: int | None = None) -> Prompt:
        messages: list[dict[str, Any]] = request.prompt  # type: ignore[assignment]
        return Prompt([1] * sum(len(message["content"]) for message in messages))

    monkeypatch.setattr(context_overflow, "tokenize_here", tokenize)


def conversation(*turns: tuple[str, int]) -> InferenceRequest:
    messages = [{"role": role, "content": "x" * length} for role, length in turns]
    return InferenceRequest("m", messages, SamplingParams(), 10)


@pytest.mark.usefixtures("one_token_per_letter")
def test_as_few_messages_as_necessary_are_dropped_in_the_middle() -> None:
    turns = [("system", 10), ("user", 30), ("assistant", 30), ("user", 20), ("tool", 5), ("assistant", 5), ("user", 20)]
    request = conversation(*turns)
    assert context_overflow.output_room(MODEL, request) == 10
    prompt = context_overflow.shorten_prompt(MODEL, request, 90)
    assert (prompt.num_tokens, prompt.dropped_messages) == (60, 2)
    prompt = context_overflow.shorten_prompt(MODEL, request, 59)  # the tool's result leaves with its call
    assert (prompt.num_tokens, prompt.dropped_messages) == (30, 5)
    with pytest.raises(ApiError) as exc_info:
        context_overflow.shorten_prompt(MODEL, request, 29)
    assert exc_info.value.code == "context_length_exceeded"


def test_only_conversations_of_own_models_are_shortened() -> None:
    request = conversation(("user", 3))
    assert context_overflow.can_shorten(MODEL, request)
    assert not context_overflow.can_shorten(MODEL, msgspec.structs.replace(request, prompt="text"))
