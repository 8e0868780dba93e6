"""False usage of upstreams in all dialects: client, bill, budgets and costs see the same plausible tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import httpx2
import pytest
import redis

from billing.models import ExecutionCost, UsageEvent, UsageQuarantine
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from tests.support.billing.books import rate_card
from tests.support.invariants import assert_ledger_invariants
from tests.support.rows import unscoped
from tests.support.upstreams.platform import eventually, upstream_platform
from tests.support.upstreams.protocol_server import Answer, ProtocolServer

pytestmark = pytest.mark.timeout(300)
MAX_TOKENS = 8
CONTEXT_LENGTH = 50_000
LONGEST_PROMPT = 2000  # more than is reserved for a short request, and less than the false prompts
TEXT = "Hello from upstream"
COUNTED = -(-len(TEXT) // 4)  # Millrace's own count of the output


class Case(NamedTuple):
    """A false usage, and what becomes of it."""

    usages: list[Any]
    output: int = MAX_TOKENS  # that is billed
    source: str = "upstream"
    is_clamped: bool = True


def openai(prompt: Any = 11, output: Any = 7, **details: Any) -> dict[str, Any]:
    prompt_details = {name: details[name] for name in ("cached_tokens", "cache_write_tokens") if name in details}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": prompt_details,
        "completion_tokens_details": {"reasoning_tokens": details.get("reasoning", 0)},
    } | ({"total_tokens": details["total"]} if "total" in details else {})


def anthropic(prompt: Any = 11, output: Any = 7, **more: Any) -> list[Any]:
    return [{"input_tokens": prompt, "output_tokens": 1, **more}, {"output_tokens": output}]


IGNORED = {"output": COUNTED, "source": "estimated", "is_clamped": False}
NO_COUNTS: list[Any] = [2**63, 2**31 + 1, -5, 7.5, "x", "", [7], {"n": 7}, True]
OPENAI_CASES: dict[str, Case] = {
    "output": Case([openai(output=100_000)]),
    "prompt": Case([openai(prompt=300_000)], 7),
    "largest": Case([openai(2**31, 2**31)]),
    "cached above the prompt": Case([openai(cached_tokens=5000)], 7, is_clamped=False),
    "a long cached prompt": Case([openai(300_000, cached_tokens=299_000)], 7),
    "a long written prompt": Case([openai(300_000, cache_write_tokens=300_000)], 7),
    "reasoning above the output": Case([openai(reasoning=100_000)], 7, is_clamped=False),
    "reasoning beside the output": Case([openai(reasoning=5000, total=11 + 7 + 5000)]),
    "a total above its parts": Case([openai(total=10**6)], 7, is_clamped=False),
    "twice": Case([openai(output=3), openai(output=7)], 7, is_clamped=False),
    "null and a usage": Case([None, openai()], 7, is_clamped=False),
    "growing": Case([openai(output=7), openai(output=100_000)]),
    "missing": Case([], **IGNORED),
    "null": Case([None], **IGNORED),
    "empty": Case([{}], **IGNORED),
    "null counts": Case([openai(None, None)], **IGNORED),
    **{f"output {json.dumps(value)}": Case([openai(output=value)], **IGNORED) for value in NO_COUNTS},
    **{f"prompt {json.dumps(value)}": Case([openai(prompt=value)], 7, "estimated", False) for value in NO_COUNTS},
    **{f"cached {json.dumps(value)}": Case([openai(cached_tokens=value)], 7, is_clamped=False) for value in NO_COUNTS},
    **{f"text {value}": Case([openai("11", value)], 7, is_clamped=False) for value in ("7", "7 ", 7.0)},
    "zeros after a usage": Case([openai(), openai(0, 0)], 7, is_clamped=False),
    "only zeros": Case([openai(0, 0)], **IGNORED),
    "no output beside an answer": Case([openai(output=0)], **IGNORED),
    "no output, but a total": Case([openai(output=None, total=18)], 7, is_clamped=False),
    "cached tokens beside the prompt": Case([openai(cached_tokens=8, total=26)], 7, is_clamped=False),
    **{f"usage {json.dumps(value)}": Case([value], **IGNORED) for value in NO_COUNTS},
}
ANTHROPIC_CASES: dict[str, Case] = {
    "output": Case(anthropic(output=100_000)),
    "prompt": Case(anthropic(prompt=300_000), 7),
    "largest": Case(anthropic(2**31, 2**31, cache_read_input_tokens=2**31)),
    "a long cached prompt": Case(anthropic(cache_read_input_tokens=300_000), 7),
    "a long written prompt": Case(anthropic(cache_creation_input_tokens=300_000), 7),
    "hours above the writes": Case(anthropic(cache_creation={"ephemeral_1h_input_tokens": 300_000}), 7),
    "twice": Case([*anthropic(output=3), {"output_tokens": 7}], 7, is_clamped=False),
    "repeated totals": Case([*anthropic(), {"input_tokens": 300_000, "output_tokens": 100_000}]),
    "missing": Case([None, None], **IGNORED),
    "empty": Case([{}, {}], **IGNORED),
    **{f"output {json.dumps(value)}": Case(anthropic(output=value), **IGNORED) for value in NO_COUNTS},
    **{f"usage {json.dumps(value)}": Case([value, value], **IGNORED) for value in NO_COUNTS},
}
# Path, body and stream of each dialect.
MESSAGES = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": MAX_TOKENS}
CHAT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", MESSAGES),
    ("/v1/chat/completions", {**MESSAGES, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/messages", MESSAGES),
    ("/v1/messages", {**MESSAGES, "stream": True}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": MAX_TOKENS}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": MAX_TOKENS, "stream": True}),
]
COMPLETIONS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hi", "max_tokens": MAX_TOKENS}),
    (
        "/v1/completions",
        {"prompt": "Hi", "max_tokens": MAX_TOKENS, "stream": True, "stream_options": {"include_usage": True}},
    ),
]


class Asked(NamedTuple):
    """A request with a false usage, and what its client received."""

    name: str
    case: Case
    max_output: int
    counts: tuple[int, int]  # of the prompt and the output
    cost: str | None  # the header, without a stream


def body_counts(response: httpx2.Response, *, stream: bool) -> tuple[int, int]:
    """Return the tokens of prompt and output in a response's body, in any dialect."""
    lines = [line[5:].strip() for line in response.text.splitlines() if line.startswith("data:")]
    found = [json.loads(line) for line in lines if line != "[DONE]"] if stream else [response.json()]
    usages = [usage for each in found if (usage := each.get("usage") or each.get("response", {}).get("usage"))]
    usage = usages[-1]
    if "prompt_tokens" in usage:
        return usage["prompt_tokens"], usage.get("completion_tokens", 0)
    cached = [usage.get(f"cache_{name}_input_tokens", 0) for name in ("read", "creation")]
    return usage["input_tokens"] + sum(cached), usage["output_tokens"]


def ask_all(client: httpx2.Client, server: ProtocolServer) -> dict[str, Asked]:
    """Send a request for each case and dialect. Returns them by request ID."""
    asked: dict[str, Asked] = {}
    for model, cases, requests in (
        ("gpt", OPENAI_CASES, [*CHAT, *COMPLETIONS]),
        ("claude", ANTHROPIC_CASES, CHAT),
        ("vectors", OPENAI_CASES, [("/v1/embeddings", {"input": "Hi"})]),
    ):
        for name, case in cases.items():
            for path, body in requests:
                server.default = Answer(TEXT, raw_usages=case.usages or [None])
                response = client.post(path, json={"model": model, **body})
                label = f"{model} {path} {name}: {response.text[-500:]}"
                assert response.status_code == 200, label
                stream = bool(body.get("stream"))
                counts = body_counts(response, stream=stream)
                max_output = 0 if "/embeddings" in path else MAX_TOKENS
                cost = None if stream else response.headers["x-millrace-cost-usd"]
                asked[response.headers["x-request-id"]] = Asked(label, case, max_output, counts, cost)
    return asked


def test_all_see_the_same_plausible_tokens(broker: redis.Redis, database: str, secret: str) -> None:
    for model in ("gpt", "claude", "vectors"):
        rate_card(model)
    server = ProtocolServer()
    try:
        with upstream_platform(broker, database, secret, {1: "sk"}) as platform:
            common: dict[str, Any] = {"allow_internal": True, "context_length": CONTEXT_LENGTH}
            openai_engine = UpstreamEngine.OPENAI
            platform.deploy(
                {
                    "gpt": UpstreamSpec(openai_engine, server.url, "gpt-x", "openai", 1, **common),
                    "claude": UpstreamSpec(UpstreamEngine.ANTHROPIC, server.url, "c", "anthropic", 1, **common),
                    "vectors": UpstreamSpec(
                        openai_engine, server.url, "e", "openai", 1, task="embed", dimensions=3, **common
                    ),
                }
            )
            asked = ask_all(platform.client, server)
            eventually(lambda: unscoped(UsageEvent).count() >= len(asked))
    finally:
        server.close()
    assert unscoped(UsageQuarantine).count() == 0
    costs = {row.request_id: row for row in unscoped(ExecutionCost).all()}
    problems = []
    for event in unscoped(UsageEvent).all():
        found = asked.pop(event.request_id)
        problems += [f"{text} ({found.name})" for text in differences(found, event, costs[event.request_id])]
    assert not problems, "\n".join(problems)
    assert not asked
    assert_ledger_invariants(database)


def differences(asked: Asked, event: UsageEvent, cost: ExecutionCost) -> Iterator[str]:
    """Yield what differs between the response, the usage event, the reservation, the operator's cost and the case."""
    case = asked.case
    prompt = event.uncached + event.cache_read + event.cache_write_5m + event.cache_write_1h
    booked = cost.uncached + cost.cache_read + cost.cache_write_5m + cost.cache_write_1h, cost.output
    if (prompt, event.output) != asked.counts:
        yield f"the client received {asked.counts}, the bill has {prompt, event.output}"
    if asked.cost is not None and round(Decimal(asked.cost) * 10**15) != event.cost_femto:
        yield f"the header has {asked.cost}, the bill {event.cost_femto}"
    if not 0 < prompt <= LONGEST_PROMPT or event.cost_femto > event.reserved_nano * 10**6:
        yield f"{prompt} tokens are above the reservation"
    if event.reasoning_tokens > event.output:
        yield "there is more reasoning than output"
    if sum(booked) != prompt + event.output + event.unbilled_tokens or max(booked) > CONTEXT_LENGTH:
        yield f"the booked tokens are {booked}"
    if asked.max_output:
        found = (event.output, event.usage_source, event.unbilled_tokens > 0, cost.unbilled_femto > 0)
        if found != (case.output, case.source, case.is_clamped, case.is_clamped):
            yield f"found {found}"
