"""The explanation of one request of each kind, read back through the API of a running platform."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.support.e2e.deployments import publish_prices, run_deployments
from tests.support.stack import MODEL, Stack, eventually

pytestmark = pytest.mark.usefixtures("signed_in_operator")
BRIEF = "brief"  # a deployment with a small context
ALIAS = "explained"
CONTEXT = 512
TALK = [("user", "Tell me about rivers. " * 80), ("assistant", "Rivers flow. " * 80), ("user", "And lakes? " * 10)]
CLASSIFIER = {"weights": base64.b64encode(bytes(8)).decode(), "scale": 1.0, "lengths": [0.0] * 5, "bias": 0.0}


@pytest.fixture
def platform(stack: Stack) -> Iterator[Stack]:
    """The platform with two models of different contexts, and without the policy that tests publish."""
    options = [
        "--source",
        "embedded",
        "--dtype",
        "float32",
        "--kv-cache-memory",
        "128MiB",
        "--max-model-len",
        str(CONTEXT),
    ]
    added = run_deployments("add", BRIEF, *options)
    run_deployments("load", BRIEF, "--wait")
    if not added["has_price"]:
        publish_prices(stack, BRIEF)
    eventually(lambda: ask(stack, BRIEF).status_code == 200)
    yield stack
    run_deployments("remove", BRIEF)
    with httpx2.Client(base_url=stack.url, headers=stack.headers, timeout=60) as client:
        found = client.get("/api/policies", params={"active": "true"}).raise_for_status().json()["results"]
        for policy in found:
            if policy["name"] == ALIAS:
                client.delete(f"/api/policies/{policy['id']}").raise_for_status()
    eventually(lambda: not {ALIAS, BRIEF} & {model.id for model in stack.client().models.list()})


def ask(stack: Stack, model: str, messages: Any = "Hi", **fields: Any) -> httpx2.Response:
    if isinstance(messages, str):
        messages = [("user", messages)]
    body = {"model": model, "max_tokens": 4, "temperature": 0, **fields}
    body["messages"] = [{"role": role, "content": content} for role, content in messages]
    return httpx2.post(f"{stack.url}/v1/chat/completions", json=body, headers=stack.headers, timeout=120)


def explain(stack: Stack, answer: httpx2.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    url = f"{stack.url}/v1/requests/{answer.headers['x-request-id']}/decisions"
    response = httpx2.get(url, headers=stack.headers, timeout=60)
    assert response.status_code == 200, response.text
    found = response.json()
    executions = found.get("executions", ())  # none of a cached answer
    assert all(each["by"] in ("cached", "prefix", "spill", "load") and each["replica"] for each in executions)
    return dict(found)


def publish(stack: Stack, rules: list[Any], **fields: Any) -> None:
    """Publish the policy and wait until gateways use it."""
    body = {"name": ALIAS, "body": {"rules": rules, **fields}}
    made = httpx2.post(f"{stack.url}/api/policies", json=body, headers=stack.headers, timeout=60)
    assert made.status_code == 201, made.text

    def is_active() -> bool:
        answer = ask(stack, ALIAS)
        return answer.status_code == 200 and explain(stack, answer)["policy"]["version"] == made.json()["version"]

    eventually(is_active)


def targets(*models: str) -> list[dict[str, str]]:
    return [{"model": model} for model in models]


def test_the_decision_of_each_kind_of_request_is_explained(platform: Stack) -> None:
    plain = explain(platform, ask(platform, MODEL))
    assert (plain["requested_model"], [each["model"] for each in plain["executions"]]) == (MODEL, [MODEL])

    # A deployment that is removed after the publication.
    run_deployments("add", "gone", "--source", "embedded", "--pool", "nowhere=1")
    publish_prices(platform, "gone")
    publish(
        platform,
        [
            {"name": "Short", "when": {"task": ["short"]}, "targets": targets(BRIEF)},
            {"name": "Gone", "when": {"task": ["gone"]}, "strategy": "ordered", "targets": targets("gone", MODEL)},
            *(
                {"name": name, "when": {"task": [name]}, "strategy": name, "targets": targets(MODEL, BRIEF)}
                for name in ("cheapest", "lowest_latency", "least_busy")
            ),
            {
                "name": "Checked",
                "when": {"task": ["checked"]},
                "strategy": "ordered",
                "targets": targets(BRIEF, MODEL),
                "escalate": {"on": ["pattern"], "pattern": "[0-9]{40}"},
            },
            {
                "name": "Complex",
                "when": {"complexity": {"at_least": 500}},
                "strategy": "ordered",
                "targets": targets(BRIEF, MODEL),
            },
        ],
        complexity=CLASSIFIER,
    )
    run_deployments("remove", "gone")
    found = explain(platform, ask(platform, ALIAS, metadata={"task": "short"}))
    assert (found["policy"]["rule_name"], found["policy"]["draw"], found["facts"]["task"]) == ("Short", 0, "short")
    found = explain(platform, ask(platform, ALIAS, metadata={"task": "gone"}))
    assert found["skipped"] == [{"model": "gone", "reason": "not served here"}]
    for name, value in (("cheapest", "cost_nano"), ("lowest_latency", "ttft_ms"), ("least_busy", "load")):
        policy = explain(platform, ask(platform, ALIAS, metadata={"task": name}))["policy"]
        assert (policy["strategy"], set(policy[value]) <= {MODEL, BRIEF}) == (name, True)
    found = explain(platform, ask(platform, ALIAS, metadata={"task": "checked"}))
    assert [each["check"] for each in found["escalations"]] == ["pattern", "pattern"]
    assert [(each["execution"], each["model"]) for each in found["executions"]] == [(0, BRIEF), (1, MODEL)]
    found = explain(platform, ask(platform, ALIAS, TALK))  # outgrows the context of the first target
    assert (found["policy"]["rule_name"], found["facts"]["complexity"]) == ("Complex", 500)
    assert found["skipped"] == [{"model": BRIEF, "reason": "context_length_exceeded"}]
    assert found["classifier"]

    publish(platform, [{"targets": targets(BRIEF)}], context_overflow="drop_middle")
    assert explain(platform, ask(platform, ALIAS, TALK))["dropped_messages"] == 2
    publish(platform, [{"targets": targets(BRIEF)}], context_overflow="summarize", summarizer=MODEL)
    answer = ask(platform, ALIAS, TALK)
    found = explain(platform, answer)
    assert (found["dropped_messages"], found["summary"]["model"], found["summary"]["messages"]) == (2, MODEL, 2)
    request_id = answer.headers["x-request-id"]
    story = f"{platform.url}/api/requests/{request_id}"

    def is_settled() -> bool:
        record = httpx2.get(story, headers=platform.headers, timeout=60)
        return record.status_code == 200 and len(record.json()["executions"]) == 2

    eventually(is_settled)  # each execution is billed at the price of its model
    record = httpx2.get(story, headers=platform.headers, timeout=60).json()
    assert {each["model"] for each in record["executions"]} == {BRIEF, MODEL}
    assert record["usd"] == answer.headers["x-millrace-cost-usd"]


def test_a_shadow_is_compared_billed_and_never_returned(platform: Stack) -> None:
    publish(platform, [{"targets": targets(MODEL)}], shadow={"model": BRIEF, "percent": 100})
    results = f"{platform.url}/api/policies/shadow-results?name={ALIAS}"

    def compared() -> list[dict[str, Any]]:
        response = httpx2.get(results, headers=platform.headers, timeout=60)
        assert response.status_code == 200, response.text
        found: list[dict[str, Any]] = response.json()
        return found

    before = sum(each["compared"] for each in compared())
    answer = ask(platform, ALIAS, "Shadow me")
    found = explain(platform, answer)
    assert (found["shadow"]["model"], [each["model"] for each in found["executions"]]) == (BRIEF, [MODEL])
    name = f"{answer.headers['x-request-id']}.s"
    stream = httpx2.get(f"{platform.url}/v1/streams/{name}", headers=platform.headers, timeout=60)
    assert stream.status_code == 404
    eventually(lambda: sum(each["compared"] for each in compared()) > before)
    (result,) = compared()
    assert (result["answered"]["model"], result["shadow"]["model"]) == (MODEL, BRIEF)
    assert float(result["shadow"]["usd"]) > 0

    def events() -> list[dict[str, Any]]:
        response = httpx2.get(
            f"{platform.url}/api/usage/events?request_id={name}", headers=platform.headers, timeout=60
        )
        found: list[dict[str, Any]] = response.json()["results"]
        return found

    eventually(lambda: len(events()) == 1)
    assert events()[0]["model"] == BRIEF


def test_a_replica_is_chosen_by_the_digest_of_its_cache(stack: Stack) -> None:
    prompt = "The digest of a cache has the hashes of its blocks. " * 30
    assert ask(stack, MODEL, prompt).status_code == 200

    def is_predicted() -> bool:
        (placed,) = explain(stack, ask(stack, MODEL, prompt))["executions"]
        return bool(placed["by"] == "cached" and placed["predicted_cached_tokens"] >= 200)

    eventually(is_predicted)
    eventually(lambda: stack.metric("millrace_prefix_predicted_tokens_total") >= 200)
    assert abs(stack.metric("millrace_prefix_hit_rate_difference")) < 0.5


def test_the_arm_of_an_experiment_and_a_cached_answer_are_explained(stack: Stack) -> None:
    arms = [{"name": "a", "share": 50}, {"name": "b", "share": 50, "model": MODEL}]
    body = {"name": "explained", "model": MODEL, "unit": "end_user", "arms": arms, "primary_metric": "cost"}
    made = httpx2.post(f"{stack.url}/api/experiments", json=body, headers=stack.headers, timeout=60)
    assert made.status_code == 201, made.text
    url = f"{stack.url}/api/experiments/{made.json()['id']}"
    httpx2.post(f"{url}/start", headers=stack.headers, timeout=60).raise_for_status()
    try:
        eventually(lambda: "experiment" in explain(stack, ask(stack, MODEL, user="ann")))
        found = explain(stack, ask(stack, MODEL, user="ann"))
        assert found["experiment"]["name"] in ("a", "b")
    finally:
        httpx2.post(f"{url}/stop", headers=stack.headers, timeout=60).raise_for_status()
    tenant = f"{stack.url}/api/tenant"
    httpx2.patch(tenant, json={"answer_cache_seconds": 600}, headers=stack.headers, timeout=60).raise_for_status()
    try:
        eventually(lambda: ask(stack, MODEL, "Cache me").headers.get("x-millrace-cache") == "exact")
        found = explain(stack, ask(stack, MODEL, "Cache me"))
        assert found["answer_cache"]
    finally:
        httpx2.patch(tenant, json={"answer_cache_seconds": 0}, headers=stack.headers, timeout=60).raise_for_status()
