"""Templates that refuse conversations which the API allows: what a probe finds, and prompts of adapted messages."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from inference_worker.checkpoints.chat_template import ChatTemplate
from inference_worker.checkpoints.template_probe import TemplateTraits, adapt_messages, probe_template
from inference_worker.checkpoints.tokenizer import Tokenizer
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.types import InferenceRequest
from millrace.gateway.protocols.anthropic.messages import read_messages
from millrace.gateway.protocols.openai.chat import read_chat
from millrace.gateway.protocols.prompts import tokenize, tokenize_here
from millrace.gateway.protocols.responses.body import read_response
from tests.support.engine.tiny_tokenizer import write_tokenizer

DATA = Path(__file__).parents[2] / "data" / "chat_templates"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# The structure of Gemma 2 and 3: strictly alternating turns, and no system role or the text in the first turn.
GEMMA2 = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{- raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
PARTS = """{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"""
TEXT_ARGUMENTS = """{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}
{{- 'CALL ' + c.function.arguments }}{% endfor %}{% else %}{{ m.role + ': ' + m.content }}{% endif %}
{% endfor %}"""
OBJECT_ARGUMENTS = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}
{%- for key, value in c.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}{% endfor %}{% endfor %}"""
LATER_SYSTEM = """{% for m in messages %}{% if m.role == 'system' and not loop.first %}
{{- raise_exception('System message must be at the beginning.') }}{% endif %}
[{{ m.role }}]{{ m.content }}{% endfor %}"""
OWN = {
    "chatml": CHATML,
    "gemma2": GEMMA2,
    "parts": PARTS,
    "text_arguments": TEXT_ARGUMENTS,
    "object_arguments": OBJECT_ARGUMENTS,
    "later_system": LATER_SYSTEM,
}
TEMPLATES = OWN | {path.stem: path.read_text() for path in sorted(DATA.glob("*.jinja"))}


def make_model(name: str, directory: Path) -> ServedModel:
    write_tokenizer(directory, ("<|im_start|>", "<|im_end|>"), TEMPLATES[name])
    return ServedModel("m", Tokenizer.from_dir(directory), 1 << 16, 1 << 10, 0)


def render_prompt(model: ServedModel, request: InferenceRequest) -> str:
    return model.tokenizer.decode(tokenize_here(model, request).ids, skip_special_tokens=False)


CALL = {"id": "call_" + "0a" * 12, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "Forecasts.", "parameters": {"type": "object"}},
}
SYSTEM, USER, NEXT = (
    {"role": role, "content": text} for role, text in (("system", "Be brief."), ("user", "One."), ("user", "Two."))
)
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
CUT = {**CALLING, "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": '{"city": "Os'}}]}
RESULT = {"role": "tool", "tool_call_id": CALL["id"], "content": "rain"}
ANSWER = {"role": "assistant", "content": "Wet."}
BLOCKS = {
    "max_tokens": 8,
    "messages": [
        USER,
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "toolu_01", "name": "weather", "input": {"city": "Oslo"}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_01", "content": "rain"},
                {"type": "text", "text": "Two."},
            ],
        },
    ],
}
# Conversations that the API allows, and texts that each template's prompt must contain in this order.
CONVERSATIONS: Mapping[str, tuple[Callable[[bytes], InferenceRequest], dict[str, Any], tuple[str, ...]]] = {
    "system": (read_chat, {"messages": [SYSTEM, USER]}, ("Be brief.", "One.")),
    "two systems": (
        read_chat,
        {"messages": [SYSTEM, {**SYSTEM, "content": "Be kind."}, USER]},
        ("Be brief.", "Be kind.", "One."),
    ),
    "later system": (read_chat, {"messages": [USER, ANSWER, SYSTEM, NEXT]}, ("One.", "Wet.", "Be brief.", "Two.")),
    "consecutive users": (read_chat, {"messages": [USER, NEXT]}, ("One.", "Two.")),
    "consecutive users of Anthropic": (read_messages, {"max_tokens": 8, "messages": [USER, NEXT]}, ("One.", "Two.")),
    "consecutive answers": (
        read_chat,
        {"messages": [USER, ANSWER, {**ANSWER, "content": "Cold."}, NEXT]},
        ("One.", "Wet.", "Cold.", "Two."),
    ),
    "instructions": (
        read_response,
        {"instructions": "Be brief.", "input": [USER, NEXT]},
        ("Be brief.", "One.", "Two."),
    ),
    "parts": (read_chat, {"messages": [{"role": "user", "content": [{"type": "text", "text": "One."}]}]}, ("One.",)),
    "calls": (
        read_chat,
        {"messages": [USER, CALLING, RESULT, ANSWER]},
        ("One.", "weather", "city", "Oslo", "rain", "Wet."),
    ),
    "tools": (read_chat, {"messages": [USER, CALLING, RESULT], "tools": [TOOL]}, ("weather", "Oslo", "rain")),
    "a user after a result": (
        read_chat,
        {"messages": [USER, CALLING, RESULT, NEXT]},
        ("weather", "Oslo", "rain", "Two."),
    ),
    "a user after a result of Anthropic": (read_messages, BLOCKS, ("weather", "Oslo", "rain", "Two.")),
    "a call that was cut": (read_chat, {"messages": [USER, CUT, RESULT, ANSWER]}, ("weather", "Os", "rain", "Wet.")),
}


# The words of earlier calls that a template leaves out of the prompt.
CALL_WORDS = ("weather", "city", "Oslo", "Os")
DROPPED = {"granite3.3": CALL_WORDS, "smollm3": CALL_WORDS, "text_arguments": ("weather",)}
MISTRAL = ("refuses_later_system", "refuses_consecutive", "refuses_user_after_result", "renders_calls", "short_ids")
TRAITS: Mapping[str, tuple[str, ...]] = {
    "chatml": (),
    "gemma2": ("refuses_system", "refuses_later_system", "refuses_consecutive"),
    "parts": ("parts",),
    "text_arguments": ("renders_calls", "text_arguments"),
    "object_arguments": ("renders_calls", "object_arguments"),
    "later_system": ("refuses_later_system",),
    "gemma4": ("renders_calls",),
    "glm4.5": ("renders_calls", "object_arguments"),
    "granite3.3": (),
    "granite4": ("renders_calls",),
    "llama3.2_json": ("renders_calls",),
    "mistral_nemo": MISTRAL,
    "mistral_small_3.2": MISTRAL,
    "qwen2.5": ("renders_calls",),
    "qwen3": ("renders_calls",),
    "qwen3_coder": ("renders_calls", "object_arguments"),
    "smollm3": ("refuses_later_system",),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_probe_finds_what_a_template_refuses(name: str) -> None:
    traits = probe_template(ChatTemplate(TEMPLATES[name], {"bos_token": "<s>", "eos_token": "</s>"}))
    assert traits == TemplateTraits(**dict.fromkeys(TRAITS[name], True))
    assert len(traits.adaptations) == len({*TRAITS[name]} - {"renders_calls"})


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_template_takes_what_the_api_allows(name: str, tmp_path: Path) -> None:
    model = make_model(name, tmp_path)
    for title, (read, fields, parts) in CONVERSATIONS.items():
        text = render_prompt(model, read(json.dumps({"model": "m", **fields}).encode()))
        position = 0
        for part in parts:
            if part in DROPPED.get(name, ()):
                continue
            position = text.find(part, position)
            assert position >= 0, (title, part, text)


def test_messages_are_unchanged_for_other_templates() -> None:
    messages = [SYSTEM, USER, NEXT, CALLING, RESULT, NEXT, SYSTEM]
    assert adapt_messages(messages, TemplateTraits(renders_calls=True)) == messages


def test_ids_are_rewritten_alike_in_calls_and_results() -> None:
    traits = TemplateTraits(short_ids=True)
    other = {**CALL, "id": "call00000"}
    calling, result, kept = adapt_messages(
        [{**CALLING, "tool_calls": [CALL, other]}, RESULT, {**RESULT, "tool_call_id": "call00000"}], traits
    )
    ids = [call["id"] for call in calling["tool_calls"]]
    assert ids == [result["tool_call_id"], kept["tool_call_id"]]
    assert ids[1] == "call00000"
    assert len(ids[0]) == 9
    assert ids[0].isalnum()


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ raise_exception('no') }}",
        "{% if messages[1] %}{% for i in range(9999) %}{{ 'x' * 999 }}{% endfor %}{% endif %}{{ messages[0].content }}",
    ],
    ids=["slow", "refusing", "slow later"],
)
def test_a_probe_ends_within_its_work(source: str) -> None:
    start = time.thread_time()
    probe_template(ChatTemplate(source, {}))
    assert time.thread_time() - start < 2


def test_the_event_loop_does_not_probe(tmp_path: Path) -> None:
    model = make_model("chatml", tmp_path)
    request = read_chat(json.dumps({"model": "m", "messages": [USER]}).encode())
    asyncio.run(tokenize(model, request))
    assert model.tokenizer.template_traits is None
    tokenize_here(model, request)
    assert model.tokenizer.template_traits == TemplateTraits()
