"""The complexity classifier: its training, its threshold with a confidence bound, and its use in policies."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.routing import made_up
from millrace.cli.router import router
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.protocols.openai import chat
from millrace.gateway.protocols.question import question_of
from tenants.routing_policies.complexity import MAX_SCORE, MAX_TEXT, ComplexityModel, score
from tenants.routing_policies.complexity_training import (
    Outcome,
    calibrate,
    fit,
    is_at_least,
    policy_of,
    successes,
    train,
)
from tenants.routing_policies.policy import decide, parse
from tests.support.tenants.policies import facts

FLAT: dict[str, Any] = {"weights": base64.b64encode(bytes(8)).decode(), "scale": 1.0, "lengths": [0.0] * 5, "bias": 0.0}


def body(classifier: Any = FLAT, **between: int) -> dict[str, Any]:
    rules = [{"when": {"complexity": between}, "targets": [{"model": "strong"}]}, {"targets": [{"model": "weak"}]}]
    return {"complexity": classifier, "rules": rules}


def test_words_that_need_the_strong_model_raise_the_score() -> None:
    model = fit(made_up(2000))
    hard, easy = (score(model, f"{word} number 7 please") for word in ("prove", "name"))
    assert 0 <= easy < hard / 2 <= MAX_SCORE / 2
    assert score(model, "") <= MAX_SCORE
    assert score(model, "prove " * 10_000) == score(model, ("prove " * 10_000)[:MAX_TEXT])
    assert score(model, "\ud800 \0 ٣") == score(model, "\ud800 \0 ٣")
    again = parse(json.loads(json.dumps(body(msgspec.to_builtins(model), at_least=1))))
    assert again.complexity == model


def test_the_trained_policy_keeps_the_quality_on_other_outcomes() -> None:
    model, calibration = train(made_up(8000), 0.95)
    policy = parse(policy_of(model, calibration, "weak", "strong"))
    assert calibration.threshold is not None
    assert calibration.strong_share < 0.6
    decisions = [decide(policy, facts(complexity=score(model, text))) for text in ("prove number 1", "name number 1")]
    assert [decision and decision.models for decision in decisions] == [("strong", "weak"), ("weak", "strong")]


def test_the_calibration_does_not_depend_on_the_order_of_the_outcomes() -> None:
    """Files are sorted by task: here prompts of a task that both models know come first."""
    easy = [Outcome(f"easy {number}", True, True) for number in range(1500)]
    hard = [Outcome(f"hard {number}", number % 3 == 0, True) for number in range(1500)]
    (_, first), (_, last) = train(easy + hard), train(hard + easy)
    assert first == last
    assert first.threshold is None or first.quality >= 0.95


def test_without_a_useful_score_all_requests_use_the_strong_model() -> None:
    rng = np.random.default_rng(1)
    weak, strong = np.zeros(500), np.ones(500)
    calibration = calibrate(np.floor(rng.random(500) * 1000), weak, strong, 0.99)
    assert (calibration.threshold, calibration.strong_share) == (None, 1.0)
    assert policy_of(ComplexityModel(**FLAT), calibration, "a", "b")["rules"][0]["targets"][0]["model"] == "b"
    with pytest.raises(ValueError, match="need 200 different prompts"):
        train(made_up(300))


def test_the_bound_is_wrong_in_at_most_5_percent_of_all_samples() -> None:
    """The values have exactly the mean that is tested, which is the hardest case."""
    rng = np.random.default_rng(3)
    samples = rng.random((1000, 400)) < 0.3
    wrong = sum(is_at_least(sample.astype(float), 0.0, 1.0, 0.3 + 1e-9) for sample in samples)
    assert 0 < wrong <= 50
    found = sum(is_at_least(sample.astype(float), 0.0, 1.0, 0.2) for sample in samples)
    assert found > 900  # and it has power


def test_a_request_without_text_counts_as_complex() -> None:
    policy = parse(body(at_least=MAX_SCORE))
    for given, expected in ((None, "strong"), (MAX_SCORE, "strong"), (MAX_SCORE - 1, "weak")):
        decision = decide(policy, facts(complexity=given))
        assert decision is not None
        assert decision.models == (expected,)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"weights": "%"}, "$.complexity.weights"),
        ({"weights": ""}, "$.complexity.weights"),
        ({"weights": base64.b64encode(bytes(2049)).decode()}, "$.complexity.weights"),
        ({"lengths": [0.0]}, "$.complexity.lengths"),
        ({"bias": 1e9}, "$.complexity"),
        ({"trained": "x" * 201}, "$.complexity.trained"),
        ({"more": 1}, "$.complexity"),
    ],
)
def test_an_invalid_classifier_is_rejected(changes: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match="at `") as found:
        parse(body(FLAT | changes, at_least=1))
    assert f"`{place}`" in str(found.value)


def test_the_condition_needs_a_classifier_and_a_valid_range() -> None:
    with pytest.raises(ValueError, match=r"no classifier .*when\.complexity"):
        parse(body(None, at_least=1))
    with pytest.raises(ValueError, match="0 to 1,000"):
        parse(body(at_least=1001))


def test_the_fingerprint_depends_on_the_weights_only() -> None:
    model = ComplexityModel(**FLAT)
    assert msgspec.structs.replace(model, trained="later").fingerprint == model.fingerprint
    assert msgspec.structs.replace(model, bias=0.1).fingerprint != model.fingerprint


def test_the_question_is_the_last_message_of_the_user() -> None:
    def read(messages: Any) -> InferenceRequest:
        return chat.read_chat(msgspec.json.encode({"model": "m", "messages": messages}))

    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    assert question_of(read(messages)) == "user"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b" * MAX_TEXT}]
    question = question_of(read([{"role": "user", "content": parts}]))
    assert (question[0], len(question)) == ("a", MAX_TEXT)
    assert question_of(read(messages[:1])) == ""


def test_the_command_writes_a_policy(tmp_path: Path) -> None:
    data, out = tmp_path / "outcomes.jsonl", tmp_path / "policy.json"
    data.write_bytes(b"\n".join(msgspec.json.encode(outcome) for outcome in made_up(4000)))
    result = CliRunner().invoke(router, ["train", str(data), "--weak", "a", "--strong", "b", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "of its success rate" in result.output
    assert parse(json.loads(out.read_text())).models == ("b", "a")
    data.write_text('{"weak_ok": true}\n')
    result = CliRunner().invoke(router, ["train", str(data), "--weak", "a", "--strong", "b"])
    assert (result.exit_code, "line 1" in result.output) == (1, True)


def test_outcomes_may_have_further_fields() -> None:
    row = b'{"prompt": "p", "weak_ok": true, "strong_ok": false, "task": "t"}'
    assert msgspec.json.decode(row, type=Outcome) == Outcome("p", True, False)


def test_outcomes_of_one_model_that_was_drawn_train_as_well() -> None:
    rng = np.random.default_rng(5)
    drawn = [
        Outcome(each.prompt, None, each.strong_ok) if rng.random() < 0.3 else Outcome(each.prompt, each.weak_ok)
        for each in made_up(20_000)
    ]
    weak, strong = successes(drawn)
    complete = successes(made_up(20_000))
    assert weak.mean() == pytest.approx(complete[0].mean(), abs=0.02)
    assert strong.mean() == pytest.approx(complete[1].mean(), abs=0.02)
    model, calibration = train(drawn, 0.9)
    assert score(model, "prove number 1") > score(model, "name number 1")
    assert calibration.threshold is not None
    with pytest.raises(ValueError, match="needs `weak_ok`"):
        train([*drawn, Outcome("p")])
    with pytest.raises(ValueError, match="at least 5%"):
        train([Outcome(each.prompt, each.weak_ok) for each in made_up(2000)])
