"""Routing policies: their decisions for a request, and their validation."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from tenants.keys import snapshot
from tenants.routing_policies.policy import Policy, decide, parse
from tenants.routing_policies.strategies import Strategy, TargetMeasures, order_targets
from tests.support.tenants.policies import facts


def models(body: dict[str, Any], **changes: Any) -> tuple[str, ...] | None:
    decision = decide(parse(body), facts(**changes))
    return None if decision is None else decision.models


def when(**conditions: Any) -> dict[str, Any]:
    return {"rules": [{"when": conditions, "targets": [{"model": "yes"}]}, {"targets": [{"model": "no"}]}]}


def rule(**fields: Any) -> dict[str, Any]:
    return {"rules": [{"targets": [{"model": "a"}, {"model": "b"}], **fields}]}


def holds(conditions: dict[str, Any], **changes: Any) -> bool:
    return models(when(**conditions), **changes) == ("yes",)


def test_targets_are_chosen_by_weight_and_the_rest_are_fallbacks() -> None:
    body = {"rules": [{"targets": [{"model": "a", "weight": 3}, {"model": "b"}, {"model": "spare", "weight": 0}]}]}
    drawn = Counter(models(body, request_id=f"req_{n}") for n in range(2000))
    assert set(drawn) == {("a", "b", "spare"), ("b", "a", "spare")}
    assert 0.7 < drawn["a", "b", "spare"] / 2000 < 0.8
    assert models(body, request_id="req_7") == models(body, request_id="req_7")


def test_the_short_form_chooses_the_first_available_target() -> None:
    assert all(models({"models": ["a", "b", "c"]}, request_id=str(n)) == ("a", "b", "c") for n in range(20))


MEASURES = {
    "a": TargetMeasures(cost_nano=30, ttft_ms=200.0, load=0.5),
    "b": TargetMeasures(cost_nano=20, ttft_ms=None, load=0.1),
    "c": TargetMeasures(fits=False, cost_nano=10, ttft_ms=100.0, load=None),
    "spare": TargetMeasures(cost_nano=0, ttft_ms=0.0, load=0.0),
}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("ordered", "abc"), ("cheapest", "bac"), ("lowest_latency", "abc"), ("least_busy", "bac")],
)
def test_a_strategy_orders_the_targets_and_fallbacks_follow(strategy: Strategy, expected: str) -> None:
    targets = [*((model, 1) for model in "abc"), ("spare", 0)]
    order = order_targets(strategy, targets, "req_1", MEASURES.__getitem__)
    assert order.models == (*expected, "spare")


def test_a_few_requests_measure_other_targets_than_the_fastest() -> None:
    orders = [order_targets("lowest_latency", [("a", 1), ("b", 1)], f"r{n}", MEASURES.__getitem__) for n in range(2000)]
    probes = [order for order in orders if order.is_probe]
    assert {order.models for order in probes} == {("b", "a")}
    assert {order.models for order in orders if not order.is_probe} == {("a", "b")}
    assert 0.03 < len(probes) / 2000 < 0.07


def test_the_first_matching_rule_is_used() -> None:
    decision = decide(parse(when(prompt_tokens={"at_least": 50})), facts())
    assert decision is not None
    assert (decision.rule, decision.models) == (0, ("yes",))
    nothing = {"rules": [{"when": {"tools": True}, "targets": [{"model": "a"}]}]}
    assert models(nothing) is None


def test_conditions() -> None:
    assert holds({"prompt_tokens": {"at_least": 100, "at_most": 100}})
    assert not holds({"prompt_tokens": {"at_least": 101}})
    assert not holds({"prompt_tokens": {"at_most": 99}})
    assert holds({"tools": False})
    assert not holds({"tools": True})
    assert holds({"tools": True}, tools=True)
    assert holds({"schema": True}, schema=True)
    assert holds({"keys": [3, 1]})
    assert not holds({"keys": [2]})
    assert not holds({"keys": [1], "tools": True})
    assert holds({"images": True}, images=True)
    assert not holds({"images": True})
    assert holds({"projects": [4]}, project_id=4)
    assert not holds({"projects": [4]}, project_id=5)
    assert holds({"task": ["sum", "qa"]}, task="qa")
    assert not holds({"task": ["sum"]}, task="")


def test_all_metadata_fields_must_have_one_of_their_values() -> None:
    condition = {"metadata": {"team": ["a", "b"], "tier": ["pro"]}}
    assert holds(condition, metadata={"team": "b", "tier": "pro", "more": "x"})
    assert not holds(condition, metadata={"team": "b"})
    assert not holds(condition, metadata={"team": "c", "tier": "pro"})


@pytest.mark.parametrize(("left", "met"), [(None, False), (20.0, True), (20.5, False), (0.0, True)])
def test_a_request_without_budget_has_all_of_it_left(left: float | None, met: bool) -> None:
    assert holds({"budget_left": {"at_most": 20}}, budget_left=left) is met


@pytest.mark.parametrize(
    ("hours", "hour", "inside"),
    [
        ({"start": "09:00", "end": "13:00"}, 12, True),
        ({"start": "09:00", "end": "12:00"}, 12, False),
        ({"start": "12:00", "end": "13:00"}, 12, True),
        ({"start": "22:00", "end": "06:00"}, 23, True),
        ({"start": "22:00", "end": "06:00"}, 5, True),
        ({"start": "22:00", "end": "06:00"}, 6, False),
        ({"start": "22:00", "end": "06:00", "days": ["sat"]}, 23, True),
        ({"start": "22:00", "end": "06:00", "days": ["sat"]}, 5, False),  # that night began on Friday
        ({"start": "22:00", "end": "06:00", "days": ["fri"]}, 5, True),
        ({"start": "09:00", "end": "17:00", "days": ["mon", "tue", "wed", "thu", "fri"]}, 12, False),
        ({"start": "07:00", "end": "08:00", "zone": "America/New_York"}, 12, True),
        ({"start": "12:00", "end": "13:00", "zone": "America/New_York"}, 12, False),
    ],
)
def test_hours(hours: dict[str, Any], hour: int, inside: bool) -> None:
    assert holds({"hours": hours}, at=datetime(2026, 11, 21, hour, tzinfo=UTC)) is inside


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({}, "rules"),
        ({"rules": []}, "$.rules"),
        ({"models": []}, "$.rules[0].targets"),
        ({"models": ["a", "a"]}, "$.rules[0].targets[1].model"),
        ({"models": [""]}, "$.rules[0].targets[0].model"),
        ({"models": ["a"], "rules": []}, "rules"),
        ({"rules": [{"targets": []}]}, "$.rules[0].targets"),
        ({"rules": [{"targets": [{"model": "a", "weight": 0}]}]}, "$.rules[0].targets"),
        ({"rules": [{"targets": [{"model": "a", "weight": -1}]}]}, "$.rules[0].targets[0].weight"),
        ({"rules": [{"targets": [{"model": "a", "weight": "1"}]}]}, "$.rules[0].targets[0].weight"),
        ({"rules": [{"targets": [{"model": 7}]}]}, "$.rules[0].targets[0].model"),
        ({"rules": [{"targets": [{"name": "a"}]}]}, "$.rules[0].targets[0]"),
        ({"rules": [{"targets": [{"model": "a"}]}] * 2}, "$.rules[0]"),
        (when(prompt_tokens={"at_least": 9, "at_most": 8}), "$.rules[0].when.prompt_tokens.at_most"),
        (when(prompt_tokens={"at_least": -1}), "$.rules[0].when.prompt_tokens.at_least"),
        (when(hours={"start": "9:00", "end": "10:00"}), "$.rules[0].when.hours.start"),
        (when(hours={"start": "09:00", "end": "25:00"}), "$.rules[0].when.hours.end"),
        (when(hours={"start": "09:00", "end": "09:00"}), "$.rules[0].when.hours.end"),
        (when(hours={"start": "09:00", "end": "10:00", "zone": "Mars"}), "$.rules[0].when.hours.zone"),
        (when(hours={"start": "09:00", "end": "10:00", "zone": "../etc/passwd"}), "$.rules[0].when.hours.zone"),
        (when(hours={"start": "09:00", "end": "10:00", "days": []}), "$.rules[0].when.hours.days"),
        (when(hours={"start": "09:00", "end": "10:00", "days": ["someday"]}), "$.rules[0].when.hours.days"),
        ({"models": ["a"], "fallback_on": ["error"]}, "fallback_on"),
        ({"rules": [{"targets": [{"model": "a"}]}], "fallback_on": ["rain"]}, "$.fallback_on"),
        ({"rules": [{"targets": [{"model": "a"}]}], "version": 3}, "$.version"),
        (when(keys=[]), "$.rules[0].when.keys"),
        (when(projects=[1] * 101), "$.rules[0].when.projects"),
        (when(task=[""]), "$.rules[0].when.task[0]"),
        (when(metadata={}), "$.rules[0].when.metadata"),
        (when(metadata={"team": []}), "$.rules[0].when.metadata.team"),
        (when(budget_left={"at_most": 101}), "$.rules[0].when.budget_left.at_most"),
        (rule(strategy="fastest"), "$.rules[0].strategy"),
        (rule(name="n" * 65), "$.rules[0].name"),
        (rule(escalate={"on": []}), "$.rules[0].escalate.on"),
        (rule(escalate={"on": ["empty"], "max": 9}), "$.rules[0].escalate.max"),
        (rule(escalate={"on": ["pattern"]}), "$.rules[0].escalate.pattern"),
        (rule(escalate={"on": ["empty"], "pattern": "a"}), "$.rules[0].escalate.pattern"),
        (rule(escalate={"on": ["pattern"], "pattern": "(a"}), "$.rules[0].escalate.pattern"),
        ({"rules": [{"targets": [{"model": "a"}], "escalate": {"on": ["empty"]}}]}, "$.rules[0].escalate"),
        ({**rule(), "fallback_on": ["timeout"]}, "$.first_token_ms"),
        ({**rule(), "first_token_ms": 500}, "$.first_token_ms"),
        ({**rule(), "first_token_ms": 0, "fallback_on": ["timeout"]}, "$.first_token_ms"),
        ({**rule(), "retries": {"max_per_request": 16}}, "$.retries.max_per_request"),
        ({**rule(), "retries": {"max_percent": 101}}, "$.retries.max_percent"),
        ({**rule(), "context_overflow": "summarize"}, "$.summarizer"),
        ({**rule(), "shadow": {"model": "b", "percent": 0}}, "$.shadow.percent"),
        ({**rule(), "shadow": {"model": "b", "percent": 101}}, "$.shadow.percent"),
        ({**rule(), "shadow": {"model": "", "percent": 5}}, "$.shadow.model"),
        ({**rule(), "shadow": {"model": "b"}}, "$.shadow"),
    ],
)
def test_errors_name_the_invalid_part(body: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError) as exc_info:
        parse(body)
    assert place in str(exc_info.value)


def test_a_snapshot_contains_the_whole_policy() -> None:
    policy = parse(when(hours={"start": "09:00", "end": "10:00"}, keys=[1]), version=4)
    key = snapshot.ApiKeySnapshot(
        1, 1, 1, (), None, None, False, False, snapshot.LimitSnapshot(), 1, None, {"fast": policy}
    )
    assert snapshot.decode(snapshot.encode(key)) == key
    assert msgspec.structs.asdict(snapshot.decode(snapshot.encode(key)).policies["fast"])["version"] == 4
    assert isinstance(snapshot.decode(snapshot.encode(key)).policies["fast"], Policy)
