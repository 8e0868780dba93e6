"""The decision record as it is stored."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from millrace.gateway.core.decision_record import DecisionRecord

ROUTED: dict[str, Any] = {
    "tenant": 1,
    "project": 7,
    "requested_model": "mine",
    "decided_at": "2026-11-30T20:00:00.000+00:00",
    "facts": {"tools": True},
}
POLICY: dict[str, Any] = {
    "policy": {"version": 3, "rule": 0, "draw": 0.5},
    "targets": ["a", "b"],
    "prompt_tokens": 10,
    "classifier": "f0",
    "skipped": [{"model": "c", "reason": "not served here"}],
    "experiment": {"id": 7, "arm": 0, "name": "control"},
    "metadata": {"order": "7"},
    "user": "ann",
}
PLACEMENT = {"execution": 0, "attempt": 1, "model": "a", "replica": "ra"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {**ROUTED, "facts": {}},
        {**ROUTED, "answer_cache": {"miss": "not_cached"}, "executions": [PLACEMENT]},
        {**ROUTED, **POLICY, "sampling_defaults": {"top_k": 5}, "executions": [PLACEMENT]},
        {
            **ROUTED,
            **POLICY,
            "dropped_messages": 0,
            "not_escalating": "budget_exceeded",
            "answer_cache": {},
            "summary": {"model": "a"},
            "executions": [PLACEMENT],
            "shadow": {"model": "b"},
        },
        {"checks": "req_1"},
        {"shadow_of": "req_1"},
    ],
    ids=["empty", "plain", "cached", "policy", "all stages", "check", "shadow"],
)
def test_the_json_of_a_record_is_that_of_a_dictionary_with_its_fields(fields: dict[str, Any]) -> None:
    """The order is that in which a request's fields were added when the record was a dictionary."""
    record = DecisionRecord(**fields)
    assert msgspec.json.encode(record) == msgspec.json.encode(fields)
    assert msgspec.json.decode(msgspec.json.encode(record), type=DecisionRecord) == record


def test_lists_of_a_record_grow() -> None:
    record = DecisionRecord()
    copied = msgspec.structs.replace(record)
    record.skip("b", "busy")
    record.skip("c", "busy")
    record.skip_first("a", "gone")
    record.place({**PLACEMENT, "model": "a"})
    record.place({**PLACEMENT, "model": "b"})
    check = {"model": "a", "check": "empty"}
    record.escalate(check)
    check["reason"] = "no target left"
    assert record.select(("skipped", "executions", "escalations", "user")) == {
        "skipped": [
            {"model": "a", "reason": "gone"},
            {"model": "b", "reason": "busy"},
            {"model": "c", "reason": "busy"},
        ],
        "executions": [{**PLACEMENT, "model": "a"}, {**PLACEMENT, "model": "b"}],
        "escalations": [{"model": "a", "check": "empty", "reason": "no target left"}],
    }
    assert (record.placements, copied.placements, copied.policy_version) == (record.executions, [], 0)
    assert copied == DecisionRecord()
