"""Structured output: every output that is not truncated is valid, whatever else runs in the engine."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_worker.checkpoints.model_config import ModelConfig
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.engine_config import EngineConfig
from inference_worker.contract.request import (
    Request,
    RequestOutput,
    RequestRejected,
    SamplingParams,
    StructuredSpec,
)
from inference_worker.engine.engine import LLMEngine
from inference_worker.engine.sampling.sampler import Sampler
from inference_worker.engine.sequences.runner import StepResult
from inference_worker.engine.sequences.sequence import Sequence as EngineSequence
from inference_worker.engine.sequences.step import SchedulerOutput
from inference_worker.engine.structured_output import grammars as grammars_module
from inference_worker.engine.structured_output.grammars import GrammarCompiler, fill_masks
from tests.support.engine.fakes import FakeRunner, FakeStep, run, tokens_of
from tests.support.engine.schema_samples import Schema, errors_of, made_up, suite, tools

PERSON: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = "Describe a person as JSON."


class Obedient(FakeRunner):
    """A fake runner that samples uniformly from the allowed tokens, with a preference for closing tokens.

    A token depends only on its request and position. It is chosen when its step is sampled, as in a real runner.
    """

    def __init__(self, tokenizer: Tokenizer, num_blocks: int = 2000, *, async_scheduling: bool = False) -> None:
        super().__init__(num_blocks, self._draw)
        self.async_scheduling = async_scheduling
        self._ends = np.array([(tokenizer.token_bytes(token) or b"?")[:1] in b'"}],0<' for token in range(49_152)])

    def launch(self, output: SchedulerOutput) -> FakeStep:
        self.steps.append({s.seq.request_id: s.num_new_tokens for s in output.scheduled})
        result = StepResult()

        def sample() -> None:
            result.tokens += [[self.choose(s.seq)] for s in output.scheduled if s.samples]

        return FakeStep(lambda: result, sample)

    def _draw(self, seq: EngineSequence) -> int:
        place = f"{seq.request_id}/{seq.index}/{seq.num_tokens - seq.num_prompt_tokens}"
        number = int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "little")
        if seq.grammar is None:
            return 100 + number % 1000
        bits = np.unpackbits(fill_masks([seq.grammar])[0], bitorder="little")
        allowed, ends = np.flatnonzero(bits), np.flatnonzero(bits[: len(self._ends)] & self._ends)
        some = ends if len(ends) and number % 3 else allowed
        return int(some[number // 3 % len(some)])


def engine_of(tokenizer: Tokenizer, grammars: GrammarCompiler, runner: FakeRunner, **config: Any) -> LLMEngine:
    model = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=49_152, hidden_size=8, intermediate_size=8, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=8, max_model_len=4096, rms_norm_eps=1e-5, tie_word_embeddings=True,
        attention_bias=False, mlp_bias=False, dtype="float32", eos_token_ids=(2,),
    )  # fmt: skip
    defaults: dict[str, Any] = {"block_size": 16, "measure_peaks": False}
    engine = LLMEngine(
        EngineConfig(Path(), **{**defaults, **config}), runner=runner, model_config=model, tokenizer=tokenizer
    )
    engine.grammars = grammars
    return engine


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterable[GrammarCompiler]:
    grammars = GrammarCompiler(tokenizer, 49_152)
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def wide_grammars(tokenizer: Tokenizer) -> Iterable[GrammarCompiler]:
    """Grammars of a model with more logits than tokenizer tokens."""
    grammars = GrammarCompiler(tokenizer, 49_159)
    yield grammars
    grammars.close()


def request(name: str, spec: StructuredSpec | None, prompt: Sequence[int] = range(10, 30), **params: Any) -> Request:
    return Request(name, list(prompt), SamplingParams(**{"max_tokens": 200, **params}), structured=spec)


def json_schema(schema: Any) -> StructuredSpec:
    return StructuredSpec("json_schema", json.dumps(schema))


def text_of(outputs: Iterable[RequestOutput], index: int = 0) -> str:
    return "".join(output.text for output in outputs if output.index == index)


def ends_of(outputs: Iterable[RequestOutput]) -> list[tuple[str | None, str | int | None]]:
    return [(output.finish_reason, output.stop_reason) for output in outputs if output.finished]


def answer(tokenizer: Tokenizer, grammars: GrammarCompiler, spec: StructuredSpec, **params: Any) -> list[RequestOutput]:
    engine = engine_of(tokenizer, grammars, Obedient(tokenizer))
    engine.add_request(request("x", spec, **params))
    return run(engine)["x"]


def scripted(
    tokenizer: Tokenizer, grammars: GrammarCompiler, spec: StructuredSpec, text: str, **params: Any
) -> list[RequestOutput]:
    """Return an output with the tokens of `text` and then the end of text."""
    ids = [*tokenizer.encode(text), 2]
    engine = engine_of(tokenizer, grammars, FakeRunner(100, lambda seq: ids[seq.num_output_tokens]))
    engine.add_request(request("x", spec, **params))
    return run(engine)["x"]


def two_hundred() -> list[Schema]:
    """Schemas that are enforced or rejected: half generated, half real."""
    others = [group["schema"] for group in suite() if group["draft"] != "v1"]
    return [*made_up(86), *(tool["parameters"] for tool in tools()), *others[:: len(others) // 180]]


def held_to(engine: LLMEngine, schemas: Sequence[Schema], prompt: Sequence[int], **params: Any) -> tuple[int, int]:
    """Generate one output for each schema and check it; return the numbers of accepted schemas and complete outputs."""
    names = {}
    for number, schema in enumerate(schemas):
        try:
            engine.add_request(request(str(number), json_schema(schema), prompt, seed=number, **params))
        except RequestRejected:
            continue
        names[str(number)] = schema
    outputs = run(engine)
    ended = [name for name in names if ends_of(outputs[name]) == [("stop", None)]]
    wrong = {name: found for name in ended if (found := errors_of(names[name], text_of(outputs[name])))}
    assert not wrong, {text_of(outputs[name]): names[name] for name in wrong}
    return len(names), len(ended)


def test_any_choice_of_allowed_tokens_is_valid(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    engine = engine_of(tokenizer, grammars, Obedient(tokenizer), max_num_seqs=16)
    accepted, ended = held_to(engine, two_hundred()[::4], range(10, 30))
    assert accepted >= 40
    assert ended >= 0.8 * accepted


def test_the_output_ends_with_its_grammar(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    outputs = scripted(tokenizer, grammars, json_schema(PERSON), '{"name": "Bob", "age": 3}')
    assert text_of(outputs) == '{"name": "Bob", "age": 3}'
    assert ends_of(outputs) == [("stop", None)]
    assert 2 not in tokens_of(outputs)  # no token, and no step, was spent on the end


def test_the_end_of_text_ends_an_output_that_could_continue(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    outputs = scripted(tokenizer, grammars, StructuredSpec("regex", "[0-9]+"), "42")
    assert (text_of(outputs), ends_of(outputs)) == ("42", [("stop", None)])


@pytest.mark.parametrize(
    ("kind", "text", "matches"),
    [
        ("regex", r"[0-9]{3}-[a-z]{2,5}", r"[0-9]{3}-[a-z]{2,5}"),
        ("grammar", 'start: "yes" | "no"', "yes|no"),
        ("grammar", 'root ::= "a" [0-9]{1,3} "b"', "a[0-9]{1,3}b"),
        ("json_object", "", r"(?s)\{.*\}"),
    ],
)
def test_every_kind_of_structured_output(
    tokenizer: Tokenizer, grammars: GrammarCompiler, kind: Any, text: str, matches: str
) -> None:
    engine = engine_of(tokenizer, grammars, Obedient(tokenizer))
    for number in range(20):
        engine.add_request(request(f"{kind}{number}", StructuredSpec(kind, text)))
    outputs = run(engine)
    ended = [text_of(some) for some in outputs.values() if ends_of(some)[0][0] == "stop"]
    assert len(ended) >= 15
    assert all(re.fullmatch(matches, found) for found in ended)


def test_forced_calls_of_tools(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    described = [{"name": tool["name"], "parameters": tool["parameters"]} for tool in tools()]
    by_name = {tool["name"]: tool["parameters"] for tool in tools()}
    engine = engine_of(tokenizer, grammars, Obedient(tokenizer))
    for number in range(20):
        wanted = {"tools": described, "choice": "required", "parallel": number % 2 == 0}
        engine.add_request(request(f"call {number}", StructuredSpec("tools", json.dumps(wanted), "tools")))
    called = 0
    for name, outputs in run(engine).items():
        if ends_of(outputs) != [("stop", None)]:
            continue
        calls = [json.loads(call) for call in re.findall("<tool_call>(.*?)</tool_call>", text_of(outputs), re.DOTALL)]
        assert calls and (len(calls) == 1 or int(name.split()[1]) % 2 == 0)
        for call in calls:
            assert not errors_of(by_name[call["name"]], json.dumps(call["arguments"]))
        called += 1
    assert called >= 5


def test_text_is_free_until_a_call_begins(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    wanted = {"tools": [{"name": "f", "parameters": {"type": "object"}}], "choice": "auto"}
    spec = StructuredSpec("tools", json.dumps(wanted), "tools")
    text = 'I look. <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    outputs = scripted(tokenizer, grammars, spec, text)
    assert (text_of(outputs), ends_of(outputs)) == (text, [("stop", None)])


def test_every_choice_is_constrained(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    outputs = answer(tokenizer, grammars, json_schema(PERSON), n=4)
    texts = [text_of(outputs, index) for index in range(4)]
    assert len(set(texts)) == 4
    assert not any(errors_of(PERSON, text) for text in texts)


def test_a_stop_string_ends_the_output(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    outputs = scripted(tokenizer, grammars, json_schema(PERSON), '{"name": "Bob", "age": 3}', stop=(' "ag', "xyz"))
    assert (text_of(outputs), ends_of(outputs)) == ('{"name": "Bob",', [("stop", ' "ag')])


def test_text_held_back_for_a_stop_string_is_sent_at_the_end(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    outputs = scripted(tokenizer, grammars, json_schema(PERSON), '{"name": "Bob", "age": 3}', stop=("3}!",))
    assert (text_of(outputs), ends_of(outputs)) == ('{"name": "Bob", "age": 3}', [("stop", None)])


def test_a_stop_token_id_ends_the_output(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    text = '{"name": "Bob", "age": 3}'
    comma = tokenizer.encode(text)[tokenizer.encode(text).index(tokenizer.encode('",')[0])]
    outputs = scripted(tokenizer, grammars, json_schema(PERSON), text, stop_token_ids=(comma,))
    assert (text_of(outputs), ends_of(outputs)) == ('{"name": "Bob', [("stop", comma)])


def test_a_complete_output_ends_before_min_tokens(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    outputs = scripted(tokenizer, grammars, json_schema({"type": "boolean"}), "true", min_tokens=50)
    assert (text_of(outputs), ends_of(outputs)) == ("true", [("stop", None)])


def test_max_tokens_truncates_the_output(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    outputs = scripted(tokenizer, grammars, json_schema(PERSON), '{"name": "Bob", "age": 3}', max_tokens=3)
    assert ends_of(outputs) == [("length", None)]


def test_ignore_eos_is_rejected_with_structured_output(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    with pytest.raises(RequestRejected) as exc_info:
        answer(tokenizer, grammars, json_schema(PERSON), ignore_eos=True)
    assert (exc_info.value.code, exc_info.value.param) == ("invalid_value", "ignore_eos")


def test_a_rejected_request_leaves_no_state(tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
    engine = engine_of(tokenizer, grammars, Obedient(tokenizer))
    for _ in range(2):
        with pytest.raises(RequestRejected):
            engine.add_request(request("x", json_schema({"contains": {}})))
    assert not engine.has_unfinished()
    engine.check_integrity()


def answers(
    tokenizer: Tokenizer,
    grammars: GrammarCompiler,
    *,
    async_scheduling: bool = False,
    blocks: int = 2000,
    **config: Any,
) -> tuple[LLMEngine, dict[str, str]]:
    """Run the same twelve requests, every third one unconstrained; return their texts."""
    engine = engine_of(tokenizer, grammars, Obedient(tokenizer, blocks, async_scheduling=async_scheduling), **config)
    for number in range(12):
        spec = json_schema(PERSON) if number % 3 else None
        prompt = [10 + number, *range(10, 40 + 5 * number)]
        engine.add_request(request(f"r{number}", spec, prompt, max_tokens=40 + number))
    return engine, {name: text_of(outputs) for name, outputs in run(engine).items()}


@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 5, "max_num_seqs": 4},  # prompts in chunks
        {"blocks": 14, "max_num_seqs": 8},  # preempted and computed again
        {"async_scheduling": True},
        {"async_scheduling": True, "blocks": 14, "max_num_seqs": 8, "max_num_batched_tokens": 24},
    ],
)
def test_the_outputs_equal_those_of_an_idle_engine(
    tokenizer: Tokenizer, grammars: GrammarCompiler, config: dict[str, Any]
) -> None:
    _, wanted = answers(tokenizer, grammars)
    engine, found = answers(tokenizer, grammars, **config)
    assert found == wanted
    assert ("blocks" in config) == (engine.stats().preemptions > 0)
    assert engine.stats().kv_blocks_used == 0


@pytest.mark.parametrize(("seconds", "reached"), [(1.0, "max is"), (0.0, "too much time")])
def test_a_grammar_that_exceeds_its_limits_ends_only_its_request(
    tokenizer: Tokenizer,
    grammars: GrammarCompiler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: Any,
    seconds: float,
    reached: str,
) -> None:
    """The ambiguous grammar reaches the limits of memory or of time."""
    monkeypatch.setattr(grammars_module, "_TOKEN_SECONDS", seconds)
    monkeypatch.setattr(grammars_module, "_GRACE_SECONDS", 0.005)
    greedy = StructuredSpec("grammar", 'start: x "b"\nx: "a" | x x x | x x')
    one = tokenizer.encode("a")[0]
    runner = Obedient(tokenizer)
    draw = runner.choose
    runner.choose = lambda seq: one if seq.request_id == "greedy" else draw(seq)
    engine = engine_of(tokenizer, grammars, runner)
    engine.add_request(request("greedy", greedy, max_tokens=1000))
    engine.add_request(request("other", None, max_tokens=1000))
    outputs = run(engine)
    error = outputs["greedy"][-1].error
    assert error is not None
    assert error.code == "unsupported_schema"
    assert reached in caplog.text
    assert ends_of(outputs["other"]) == [("length", None)]
    assert engine.stats().kv_blocks_used == 0


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_sampler_chooses_only_allowed_tokens_with_any_parameters(
    tokenizer: Tokenizer, wide_grammars: GrammarCompiler, data: st.DataObject
) -> None:
    rows = data.draw(st.integers(1, 5))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    vocab = data.draw(st.sampled_from([49_152, 49_000, 49_159]))  # of the model's logits; the tokenizer has its own
    logits = torch.randn(rows, vocab) * 5
    known = tokenizer.encode('{"name": "Bob", "age": 3}')
    seqs = []
    for row in range(rows):
        params = SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.7, 2.0])),
            top_k=data.draw(st.sampled_from([0, 1, 5])),
            top_p=data.draw(st.sampled_from([1.0, 0.5])),
            min_p=data.draw(st.sampled_from([0.0, 0.3])),
            min_tokens=data.draw(st.sampled_from([0, 150])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 0.1, 10.0])),
            presence_penalty=data.draw(st.sampled_from([0.0, 2.0])),
            stop_token_ids=tuple(known[: data.draw(st.integers(0, len(known)))]),
            logit_bias=tuple((token, -100.0) for token in set(known)) if data.draw(st.booleans()) else (),
            logprobs=data.draw(st.sampled_from([None, 3])),
            max_tokens=200,
        )
        spec = json_schema(PERSON) if data.draw(st.booleans()) else None
        seq = EngineSequence(Request(str(row), [5, 6], params, structured=spec), None)
        done = known[: data.draw(st.integers(0, len(known) - 1))]
        seq.tokens += done
        if spec is not None:
            seq.grammar = wide_grammars.start("1", spec)
            for token in done:
                seq.grammar.accept(token)
        seqs.append(seq)
    chosen, _ = Sampler((2,)).sample(logits, seqs, [len(seq.tokens) for seq in seqs]).read()
    for seq, token in zip(seqs, chosen, strict=True):
        if seq.grammar is not None:
            assert token < 49_152
            seq.grammar.accept(token)  # otherwise it raises


def test_a_negative_bias_is_ignored_if_no_other_token_is_allowed(
    tokenizer: Tokenizer, grammars: GrammarCompiler
) -> None:
    only = tokenizer.encode("true")
    spec = json_schema({"const": True})
    params = SamplingParams(
        temperature=1.0, min_tokens=5, max_tokens=9, stop_token_ids=(*only, *tokenizer.encode("t tr tru"))
    )
    seq = EngineSequence(Request("x", [5], params, structured=spec), None)
    seq.grammar = grammars.start("1", spec)
    chosen, _ = Sampler((2,)).sample(torch.randn(1, 49_152), [seq], [1]).read()
    seq.grammar.accept(chosen[0])


def real_engine(model_dir: Path, grammars: GrammarCompiler, **config: Any) -> LLMEngine:
    engine = LLMEngine(EngineConfig(model_dir, device="cpu", kv_cache_memory=1 << 28, measure_peaks=False, **config))
    engine.grammars = grammars
    return engine


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_models_outputs_are_valid(
    model_dir: Path, tokenizer: Tokenizer, grammars: GrammarCompiler, temperature: float
) -> None:
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}])
    engine = real_engine(model_dir, grammars)
    accepted, ended = held_to(engine, [PERSON, *made_up(7)], prompt, temperature=temperature, max_tokens=48)
    assert accepted == 8
    assert ended >= 2


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_models_outputs_for_two_hundred_schemas_are_valid(
    model_dir: Path, tokenizer: Tokenizer, grammars: GrammarCompiler
) -> None:
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}])
    accepted, ended = held_to(real_engine(model_dir, grammars), two_hundred(), prompt, temperature=0.7)
    assert accepted >= 200
    assert ended >= 100  # this small model continues until max_tokens for many of them
