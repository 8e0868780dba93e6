"""The arm of a request."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tenants.routing_policies.experiments import ExperimentArm, RunningExperiment, assign

ARMS = (ExperimentArm("a", 20), ExperimentArm("b", 30, "model"))


def arm_of(unit: str = "end_user", seed: str = "00", metadata_key: str = "", **facts: Any) -> int | None:
    experiment = RunningExperiment(7, unit, seed, ARMS, metadata_key)  # type: ignore[arg-type]
    given = {"key_id": 1, "user": None, "metadata": {}, "cache_key": None} | facts
    found = assign(experiment, **given)
    return None if found is None else found.arm


def test_arms_have_their_shares_and_a_unit_keeps_its_arm() -> None:
    users = [f"user {number}" for number in range(20_000)]
    arms = [arm_of(user=user) for user in users]
    counts = Counter(arms)
    assert counts[0] == pytest.approx(4000, abs=300)
    assert counts[1] == pytest.approx(6000, abs=300)
    assert counts[None] == pytest.approx(10_000, abs=400)
    assert arms == [arm_of(user=user, key_id=9, metadata={"x": "y"}) for user in users]
    same = sum(a == b for a, b in zip(arms, [arm_of(user=user, seed="01") for user in users], strict=True))
    assert same == pytest.approx(20_000 * (0.04 + 0.09 + 0.25), rel=0.1)  # as independent experiments


@pytest.mark.parametrize(
    ("unit", "facts"),
    [
        ("end_user", {}),
        ("end_user", {"user": ""}),
        ("conversation", {"user": "u"}),
        ("metadata", {"metadata": {"p": "c"}}),
    ],
)
def test_a_request_without_a_unit_is_in_no_arm(unit: str, facts: dict[str, Any]) -> None:
    assert arm_of(unit, metadata_key="p", **facts) is None


def test_units() -> None:
    both = {arm_of("conversation", metadata={"conversation_id": name}) for name in map(str, range(50))}
    assert both == {None, 0, 1}
    named = [arm_of("conversation", metadata={"conversation_id": name}) for name in map(str, range(50))]
    assert named == [arm_of("conversation", cache_key=name) for name in map(str, range(50))]
    assert [arm_of("metadata", metadata_key="p", metadata={"p": name}) for name in "ab"] == [0, 1]
    assert arm_of("key", key_id=3) == arm_of("key", key_id=3, user="x")
    assert arm_of(user="\udcff") in (None, 0, 1)  # a lone surrogate
