"""Enforcement of JSON schemas: accepted schemas are enforced, and others are rejected by the keyword's name."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.request import RequestRejected, StructuredSpec
from inference_worker.engine.structured_output import grammars as grammars_module
from inference_worker.engine.structured_output.grammar_cache import CacheCapacity
from inference_worker.engine.structured_output.grammars import GrammarCompiler
from tests.support.engine.schema_samples import made_up, suite, tools
from tests.support.waiting import eventually

VOCAB = 49_152
TENANT = "1"


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    grammars = GrammarCompiler(tokenizer, VOCAB)
    yield grammars
    grammars.close()


def json_schema(schema: Any) -> StructuredSpec:
    return StructuredSpec("json_schema", json.dumps(schema))


def accepts(grammars: GrammarCompiler, tokenizer: Tokenizer, spec: StructuredSpec, text: str) -> bool:
    """Return whether the whole text is allowed and can end there."""
    matcher = grammars.start(TENANT, spec).matcher
    ids = tokenizer.encode(text)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def refusal(grammars: GrammarCompiler, spec: StructuredSpec) -> RequestRejected:
    with pytest.raises(RequestRejected) as exc_info:
        grammars.start(TENANT, spec)
    return exc_info.value


def test_the_test_suite(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """No invalid instance is allowed, except for a difference in white space."""
    seen: Counter[str] = Counter()
    wrong = []
    for group in suite():
        spec = json_schema(group["schema"])
        try:
            grammars.start(TENANT, spec)
        except RequestRejected as exc:
            assert exc.code in ("unsupported_schema", "invalid_schema")
            seen["refused"] += 1
            continue
        seen["enforced"] += 1
        for test in group["tests"]:
            allowed = accepts(grammars, tokenizer, spec, json.dumps(test["data"], ensure_ascii=False))
            seen[f"{'valid' if test['valid'] else 'invalid'}, {'allowed' if allowed else 'ruled out'}"] += 1
            if allowed and not test["valid"] and test["description"] != "zero-width whitespace does not match":
                wrong.append((group["draft"], group["file"], test["description"]))
    assert wrong == []
    assert seen["enforced"] >= 330
    assert seen["valid, allowed"] >= 0.95 * (seen["valid, allowed"] + seen["valid, ruled out"])


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems (at #/properties/a)"),
        ({"anyOf": [{"not": {"type": "string"}}]}, "not (at #/anyOf/0)"),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if (at #)"),
        ({"contentEncoding": "base64"}, "contentEncoding"),
        ({"x-guidance": {"lenient": True}}, "x-guidance"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"$ref": "https://example.com/other.json"}, "https://example.com/other.json"),
        ({"type": "string", "format": "iri"}, "iri"),
        ({"type": "string", "pattern": "a(?=b)"}, "look-around"),
        ({"oneOf": [{"minimum": 2}, {"type": "integer"}]}, "oneOf"),
        ({"$defs": {"a": {"$id": "b", "type": "string"}}, "$ref": "#/$defs/a"}, "$id"),
    ],
)
def test_an_error_names_a_keyword_that_cannot_be_enforced(grammars: GrammarCompiler, schema: Any, named: str) -> None:
    refused = refusal(grammars, StructuredSpec("json_schema", json.dumps(schema), "text.format"))
    assert refused.code in ("unsupported_schema", "invalid_schema")
    assert named in refused.message
    assert refused.param == "text.format"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "no JSON"),
        ("json_schema", "[]"),
        ("json_schema", '{"minimum": NaN}'),
        ("json_schema", "[" * 100_000),
        ("json_schema", '{"type": 5}'),
        ("json_schema", json.dumps({"enum": ["x" * 300_000]})),
        ("regex", "("),
        ("regex", "(a)\\1"),
        ("regex", "a" * 20_000),
        ("grammar", "start: nowhere"),
        ("grammar", "root ::= ("),
        ("grammar", ""),
    ],
)  # fmt: skip
def test_malformed_and_too_large_schemas_are_rejected(grammars: GrammarCompiler, kind: Any, text: str) -> None:
    assert refusal(grammars, StructuredSpec(kind, text)).code in ("unsupported_schema", "invalid_schema")


HOSTILE = {
    "overflows the stack": {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": {}},
    },
    "doubles at every step": {
        "$ref": "#/$defs/d0",
        "$defs": {
            f"d{i}": {"properties": {
                "a": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"required": ["y"]}]},
                "b": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"required": ["z"]}]},
            }} for i in range(22)
        } | {"d22": {"type": "object"}},
    },
    "takes much memory": {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]},
}  # fmt: skip


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_costs_little_and_causes_no_failure(grammars: GrammarCompiler, name: str) -> None:
    began = time.process_time()
    assert "too much time or memory" in refusal(grammars, json_schema(HOSTILE[name])).message
    assert time.process_time() - began < 0.5  # of this process, since rejected schemas are compiled in another one
    refusal(grammars, json_schema(HOSTILE[name]))  # and the result is stored
    grammars.start(TENANT, json_schema({"type": "string", "description": name}))


def test_a_grammar_that_kills_its_process_is_rejected(grammars: GrammarCompiler) -> None:
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(800)) + '\nr800: "a"'
    doubling = "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "a"'
    grammars.start(TENANT, StructuredSpec("grammar", chain))
    assert refusal(grammars, StructuredSpec("grammar", doubling)).code == "unsupported_schema"


def test_a_killed_grammar_sandbox_is_restarted(tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, VOCAB)
    grammars.start(TENANT, json_schema({"type": "integer"}))
    process = grammars._sandbox._process
    assert process is not None
    process.kill()
    process.wait()
    grammars.start(TENANT, json_schema({"type": "string"}))
    assert grammars._sandbox._process is not process
    grammars.close()


def test_a_grammar_compiles_though_its_sandbox_is_killed(tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, VOCAB)
    grammars.start(TENANT, json_schema({"type": "integer"}))
    process = grammars._sandbox._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)  # the next trial gets no answer
    with ThreadPoolExecutor(1) as pool:
        trial = pool.submit(grammars.start, TENANT, json_schema({"type": "string"}))
        eventually(grammars._sandbox._trial.locked)
        process.kill()
        trial.result(30)
    assert process.returncode == -signal.SIGKILL
    grammars.close()


def test_a_closed_compiler_leaves_no_process(tokenizer: Tokenizer) -> None:
    GrammarCompiler(tokenizer, VOCAB).close()  # no process was started
    grammars = GrammarCompiler(tokenizer, VOCAB)
    grammars.start(TENANT, json_schema({"type": "integer"}))
    process = grammars._sandbox._process
    assert process is not None
    grammars.close()
    grammars.close()
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(RequestRejected):
        grammars.start(TENANT, json_schema({"type": "string"}))
    assert grammars._sandbox._process is None


def test_a_compiler_closes_during_a_compilation(tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, VOCAB)
    grammars.start(TENANT, json_schema({"type": "integer"}))
    process = grammars._sandbox._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)  # the next trial gets no answer
    with ThreadPoolExecutor(1) as pool:
        trial = pool.submit(grammars.start, TENANT, json_schema({"type": "string"}))
        eventually(grammars._sandbox._trial.locked)
        began = time.monotonic()
        grammars.close()
        assert time.monotonic() - began < 5
        assert "too much time or memory" in str(trial.exception(10))
    assert process.returncode == -signal.SIGKILL


def counted(grammars: GrammarCompiler) -> list[str]:
    """Collect the texts of the grammars that are compiled from now on."""
    tried: list[str] = []
    try_out = grammars._sandbox.try_out
    grammars._sandbox.try_out = lambda text: (tried.append(text), try_out(text))[1]  # type: ignore[method-assign]
    return tried


def test_the_first_use_of_another_tenant_compiles_again(tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, VOCAB)
    tried, spec = counted(grammars), json_schema({"type": "integer", "minimum": 7})
    refused = json_schema(HOSTILE["takes much memory"])
    for number, tenant in enumerate(("1", "2", "3"), start=1):
        assert not grammars.knows(tenant, spec)
        for _ in range(2):
            grammars.start(tenant, spec)
        with pytest.raises(RequestRejected):
            grammars.start(tenant, refused)
        assert len(tried) == 2 * number
    grammars.close()


def test_compiled_grammars_are_cached_and_unused_ones_evicted(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "TENANT_CACHE", CacheCapacity(1 << 30, 3))
    grammars = GrammarCompiler(tokenizer, VOCAB)
    specs = [json_schema({"enum": [f"value {i}"]}) for i in range(4)]
    for spec in specs[:3]:
        grammars.start(TENANT, spec)
    grammars.start(TENANT, specs[0])
    grammars.start(TENANT, specs[3])
    assert [grammars.knows(TENANT, spec) for spec in specs] == [True, False, True, True]
    grammars.close()


def test_a_schema_of_concurrent_requests_is_compiled_once(tokenizer: Tokenizer) -> None:
    grammars = GrammarCompiler(tokenizer, VOCAB)
    spec, tried = json_schema({"type": "integer", "minimum": 3}), counted(grammars)
    threads = [threading.Thread(target=grammars.start, args=(TENANT, spec)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tried) == 1
    grammars.close()


def tool_spec(choice: str, **more: Any) -> StructuredSpec:
    described = [{"name": tool["name"], "parameters": tool["parameters"]} for tool in tools()]
    return StructuredSpec("tools", json.dumps({"tools": described, "choice": choice, **more}), "tools")


CALL = '<tool_call>\n{"name": "get_user_details", "arguments": {"user_id": "a_b_1"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "list_all_airports", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("choice", "more", "text", "allowed"),
    [
        ("auto", {}, "Hello <b>you</b>.", True),
        ("auto", {}, "", True),
        ("auto", {}, f"Let me see. {CALL}", True),
        ("auto", {}, f"{CALL}\n{OTHER}", True),
        ("auto", {}, f"{CALL} and so on", False),
        ("auto", {}, '<tool_call>{"name": "no_such_tool"', False),
        ("auto", {}, '<tool_call>\n{"name": "get_user_details", "arguments": {"user_id": 5', False),
        ("auto", {}, "<tool_call>I call nothing", False),
        ("auto", {"parallel": False}, CALL, True),
        ("auto", {"parallel": False}, f"{CALL}\n{OTHER}", False),
        ("auto", {"answer": {"type": "integer"}}, "42", True),
        ("auto", {"answer": {"type": "integer"}}, CALL, True),
        ("auto", {"answer": {"type": "integer"}}, "Hello", False),
        ("required", {}, f"{CALL}\n{OTHER}", True),
        ("required", {}, "Hello", False),
        ("required", {}, "", False),
        ("get_user_details", {}, CALL, True),
        ("get_user_details", {}, OTHER, False),
        ("get_user_details", {"parallel": False}, f"{CALL}\n{CALL}", False),
    ],
)
def test_tool_calls(
    grammars: GrammarCompiler, tokenizer: Tokenizer, choice: str, more: dict[str, Any], text: str, allowed: bool
) -> None:
    assert accepts(grammars, tokenizer, tool_spec(choice, **more), text) == allowed


def test_a_non_strict_tool_schema_that_cannot_be_enforced_allows_any_arguments(
    grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"]}
    other = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}

    def spec(strict: bool) -> StructuredSpec:
        described = [{"name": "f", "parameters": schema, "strict": strict}, {"name": "g", "parameters": other}]
        return StructuredSpec("tools", json.dumps({"tools": described, "choice": "required"}), "tools")

    def allowed(name: str, arguments: str) -> bool:
        text = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        return accepts(grammars, tokenizer, spec(strict=False), text)

    assert allowed("f", '{"anything": 1}')
    assert not allowed("f", "5")
    assert not allowed("g", '{"anything": 1}')
    assert allowed("g", '{"b": 1}')
    refused = refusal(grammars, spec(strict=True))
    assert (refused.code, refused.param) == ("unsupported_schema", "tools")
    assert refused.message == "tool f: uniqueItems (at #/properties/a) is not supported"


def test_an_engine_without_the_library_raises_an_error() -> None:
    code = (
        "import sys; sys.modules['llguidance'] = None\n"
        "import inference_worker.engine.engine\n"
        "from inference_worker.engine.structured_output.grammars import GrammarCompiler\n"
        "from inference_worker.contract.request import RequestRejected, StructuredSpec\n"
        "try: GrammarCompiler(None, 10).start('tenant', StructuredSpec('regex', 'a'))\n"
        "except RequestRejected as refused: sys.exit(0 if 'llguidance' in refused.message else 2)\n"
        "sys.exit(1)"
    )
    root = Path(__file__).resolve().parents[3]
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=root).returncode == 0


def test_typical_schemas_are_enforced(grammars: GrammarCompiler) -> None:
    for schema in (*made_up(60), *(tool["parameters"] for tool in tools())):
        grammars.start(TENANT, json_schema(schema))
