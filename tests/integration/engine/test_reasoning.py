"""The end of reasoning: by the model, by its budget and before a grammar, with a real tokenizer and a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import ReasoningSpec, Request, RequestOutput, SamplingParams, StructuredSpec
from inference_worker.engine.engine import LLMEngine
from tests.support.engine.tiny_checkpoint import write_model

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
OBJECT = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
SCHEMA = StructuredSpec("json_schema", json.dumps(OBJECT))
OPEN = ReasoningSpec("think", is_open=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tiny")
    write_model(found, MARKS)
    return found


def make_engine(directory: Path, **options: object) -> LLMEngine:
    defaults = {
        "device": "cpu",
        "dtype": "float32",
        "num_blocks": 200,
        "block_size": 8,
        "measure_peaks": False,
        "threads": 1,
    }
    return LLMEngine(EngineConfig(directory, **{**defaults, **options}))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(directory: Path) -> LLMEngine:
    return make_engine(directory)


def run(engine: LLMEngine, *requests: Request) -> dict[tuple[str, int], list[RequestOutput]]:
    for request in requests:
        engine.add_request(request)
    outputs: dict[tuple[str, int], list[RequestOutput]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
    return outputs


def request(engine: LLMEngine, name: str, spec: ReasoningSpec, **fields: object) -> Request:
    assert engine.tokenizer is not None
    structured = fields.pop("structured", None)
    params = {"max_tokens": 40, "temperature": 1.0, "seed": 7, **fields}
    prompt = engine.tokenizer.encode("Question?")
    return Request(name, prompt, SamplingParams(**params), reasoning=spec, structured=structured)  # type: ignore[arg-type]


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def count(outputs: list[RequestOutput]) -> int:
    return sum(output.reasoning_tokens for output in outputs)


def texts(outputs: list[RequestOutput]) -> tuple[str, str]:
    return "".join(output.reasoning for output in outputs), "".join(output.text for output in outputs)


@pytest.mark.parametrize("budget", [0, 1, 9])
def test_a_used_budget_forces_the_end(engine: LLMEngine, budget: int) -> None:
    """The model's own end of the reasoning is excluded by its bias, so that only the budget can end it."""
    assert engine.tokenizer is not None
    end = engine.tokenizer.encode("\n</think>\n\n")
    mark = engine.tokenizer.encode("</think>")
    params = {"n": 2, "logit_bias": ((mark[0], -100.0),), "max_tokens": 30, "ignore_eos": True}
    spec = ReasoningSpec("think", is_open=True, budget=budget)
    outputs = run(engine, request(engine, "x", spec, **params), request(engine, "y", OPEN, **params))
    for index in range(2):
        found, free = outputs["x", index], outputs["y", index]
        assert tokens(found)[:budget] == tokens(free)[:budget]
        assert tokens(found)[budget : budget + len(end)] == end
        assert mark[0] not in tokens(found)[budget + len(end) :]
        assert count(found) == budget + len(end)
        reasoning, _ = texts(found)
        assert reasoning == engine.tokenizer.decode(tokens(found)[:budget]).strip()
        assert len(tokens(found)) == 30  # forced tokens count as output
        assert (texts(free)[1], count(free)) == ("", 30)
    assert sum(each.usage.output for each in outputs["x", 0] + outputs["x", 1] if each.usage) == 60


def test_preemption_does_not_change_the_output(directory: Path, engine: LLMEngine) -> None:
    small = make_engine(directory, num_blocks=20)
    specs = [ReasoningSpec("think", is_open=True, budget=20), OPEN]
    params = {"max_tokens": 60, "ignore_eos": True, "temperature": 0.0}
    wanted = [run(engine, request(engine, str(i), specs[i % 2], **params))[str(i), 0] for i in range(4)]
    found = run(small, *(request(small, str(i), specs[i % 2], **params) for i in range(4)))
    assert small.scheduler.preemptions > 0, small.stats()
    for i in range(4):
        assert (tokens(found[str(i), 0]), texts(found[str(i), 0])) == (tokens(wanted[i]), texts(wanted[i]))


def test_run_ahead_does_not_change_the_output(directory: Path, engine: LLMEngine) -> None:
    ahead = make_engine(directory, async_scheduling=True)
    for budget in (0, 5):
        spec = ReasoningSpec("think", is_open=True, budget=budget)
        outputs = [run(each, request(each, "x", spec))["x", 0] for each in (engine, ahead)]
        assert tokens(outputs[0]) == tokens(outputs[1])
        assert texts(outputs[0]) == texts(outputs[1])


def script(monkeypatch: pytest.MonkeyPatch, engine: LLMEngine, ids: list[int]) -> None:
    """Let the model prefer these tokens, in order. Masks apply."""
    runner = engine._runner
    original = runner._sampler.sample  # type: ignore[attr-defined]

    def sample(logits: torch.Tensor, seqs: list[Any], positions: list[int], drafts: Any = ()) -> object:
        logits = logits.clone()
        for row, seq in enumerate(seqs):
            number = seq.num_output_tokens
            if number < len(ids):
                logits[row, ids[number]] += 1000
        return original(logits, seqs, positions, drafts)

    monkeypatch.setattr(runner._sampler, "sample", sample)  # type: ignore[attr-defined]


Encode = Callable[[str], list[int]]


@pytest.fixture
def encode(engine: LLMEngine) -> Encode:
    assert engine.tokenizer is not None
    return engine.tokenizer.encode


@pytest.mark.parametrize(
    ("spec", "written", "reasoning", "answer", "counted"),
    [
        (OPEN, "Hm.\n</think>\n\nYes<|eos|>", "Hm.", "Yes", 5),
        (ReasoningSpec("think"), "<think>\nHm\n</think>\nYes<|eos|>", "Hm", "Yes", 6),
        (ReasoningSpec("think"), "\nYes <think>no<|eos|>", "", "\nYes <think>no", 0),
        (ReasoningSpec("think", budget=2), "<think>abcdef", "ab", None, 7),
        (OPEN, "Hm<|eos|>", "Hm", "", 2),
        (
            ReasoningSpec("granite_text"),
            "Here is my thought process: Hm. Here is my response: Yes<|eos|>",
            *("Hm.", "Yes", 52),
        ),
        (ReasoningSpec("granite"), "<think>a</think><response>b<c</response><|eos|>", "a", "b<c", 3),
        (ReasoningSpec("granite_text"), "Here is my answer<|eos|>", "", "Here is my answer", 0),
        (ReasoningSpec("granite_text"), "He<|eos|>", "", "He", 0),
    ],
)
def test_reasoning_and_answer(
    monkeypatch: pytest.MonkeyPatch,
    engine: LLMEngine,
    encode: Encode,
    spec: ReasoningSpec,
    written: str,
    reasoning: str,
    answer: str | None,
    counted: int,
) -> None:
    script(monkeypatch, engine, encode(written))
    outputs = run(engine, request(engine, "x", spec, temperature=0.0, max_tokens=80, logprobs=0))["x", 0]
    assert texts(outputs)[0] == reasoning
    assert answer is None or texts(outputs)[1] == answer
    assert count(outputs) == counted
    of_answer = [each for output in outputs for each in output.logprobs[output.reasoning_tokens :]]
    assert [each.token_id for each in of_answer] == tokens(outputs)[counted:]


def test_stops_do_not_act_within_the_reasoning(
    monkeypatch: pytest.MonkeyPatch, engine: LLMEngine, encode: Encode
) -> None:
    script(monkeypatch, engine, encode("a.b#c</think>d.e"))
    for params, answer in (({"stop": (".",)}, "d"), ({"stop_token_ids": tuple(encode("#."))}, "d")):
        outputs = run(engine, request(engine, "x", OPEN, temperature=0.0, **params))["x", 0]
        assert texts(outputs) == ("a.b#c", answer)
        assert outputs[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("spec", "written"),
    [
        (OPEN, 'x<|eos|></think>\n\n{"a": true}'),
        (ReasoningSpec("think", is_open=True, budget=1), 'xxxxxxxxxxxx{"a": true}'),
        (ReasoningSpec("think"), '<think>x</think>{"a": true}'),
        (ReasoningSpec("think"), '{"a": true}'),
        (ReasoningSpec("granite_text"), 'Here is{"a": true}'),
        (ReasoningSpec("granite_text", is_requested=True, budget=1), "x" * 40),
    ],
)
def test_a_grammar_begins_after_the_reasoning(
    monkeypatch: pytest.MonkeyPatch, engine: LLMEngine, encode: Encode, spec: ReasoningSpec, written: str
) -> None:
    script(monkeypatch, engine, encode(written))
    params = {"temperature": 0.0, "max_tokens": 100, "structured": SCHEMA}
    outputs = run(engine, request(engine, "x", spec, **params))["x", 0]
    assert outputs[-1].finish_reason == "stop"
    reasoning, answer = texts(outputs)
    assert isinstance(json.loads(answer), dict)
    has_reasoning = spec.is_open or spec.is_requested or written.startswith("<think>")
    assert bool(reasoning) == has_reasoning


def test_a_forced_call_begins_after_the_reasoning(
    monkeypatch: pytest.MonkeyPatch, engine: LLMEngine, encode: Encode
) -> None:
    script(monkeypatch, engine, encode("x</think><tool_call>"))
    tool = {"name": "f", "parameters": OBJECT}
    spec = StructuredSpec("tools", json.dumps({"tools": [tool], "choice": "required", "parallel": False}), "tools")
    params = {"temperature": 0.0, "max_tokens": 100, "structured": spec}
    outputs = run(engine, request(engine, "x", OPEN, **params))["x", 0]
    reasoning, answer = texts(outputs)
    assert reasoning == "x"
    assert encode("<tool_call>")[0] in tokens(outputs)  # the mark's own token, not its characters
    assert answer.startswith("<tool_call>")
    assert answer.endswith("</tool_call>")
