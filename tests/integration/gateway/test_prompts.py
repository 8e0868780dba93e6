"""Prompts in a model's tokens, and the positions of cache breakpoints in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from inference_worker.checkpoints.chat_template import ChatTemplate
from inference_worker.checkpoints.model_source import ensure_model
from inference_worker.checkpoints.tokenizer import Tokenizer
from inference_worker.contract.request import SamplingParams
from inference_worker.contract.settings import ModelSpec
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import MODEL_LENGTH, Breakpoint, InferenceRequest, TemplateOptions, Tool
from millrace.gateway.protocols.prompts import tokenize
from tests.support.models import models_data_dir

# As in Hermes and Qwen: tools in the system message, calls and results in separate places.
WITH_TOOLS = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS = (Tool("weather", "Tells the weather"), Tool("time", "Tells the time"))
MESSAGES = [
    {"role": "system", "content": "You are a helpful clerk of the museum."},
    {"role": "user", "content": "First part. Second part."},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "When do you open?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(ensure_model(ModelSpec("m", "embedded", "auto"), models_data_dir()))


@pytest.fixture
def model(tokenizer: Tokenizer) -> ServedModel:
    return ServedModel("m", tokenizer, 2048, tokenizer.vocab_size, 0)


@pytest.fixture
def tool_model(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> ServedModel:
    """A model whose chat template supports tools."""
    monkeypatch.setattr(model.tokenizer, "_chat", ChatTemplate(WITH_TOOLS, {}))
    return model


def request(messages: Any = MESSAGES, **fields: Any) -> InferenceRequest:
    return InferenceRequest("m", messages, SamplingParams(), **fields)


async def text(model: ServedModel, **fields: Any) -> str:
    prompt = await tokenize(model, request(**fields))
    return model.tokenizer.decode(prompt.ids, skip_special_tokens=False)


async def marked(model: ServedModel, at: Breakpoint, **fields: Any) -> str:
    """Return the text before a breakpoint."""
    prompt = await tokenize(model, request(breakpoints=(at,), **fields))
    (place,) = prompt.breakpoints
    assert place.seconds == at.seconds
    return model.tokenizer.decode(prompt.ids[: place.num_tokens], skip_special_tokens=False)


async def test_tools_are_rendered_by_the_template_or_as_text(model: ServedModel) -> None:
    plain = await text(model)
    rendered = await text(model, tools=TOOLS)
    assert rendered.index('"name": "time"') < rendered.index("\n\nYou are a helpful clerk of the museum.<|im_end|>")
    assert await text(model, tools=TOOLS, tool_choice="none") == plain


async def test_a_template_that_supports_tools_receives_them_unchanged(tool_model: ServedModel) -> None:
    rendered = await text(tool_model, tools=TOOLS)
    assert rendered.startswith('<|im_start|>system{"type": "function", "function": {"name": "weather"')
    assert "You can call functions" not in rendered
    assert "tools" not in await text(tool_model)


async def test_breakpoints_are_positions_in_the_rendered_prompt(model: ServedModel) -> None:
    whole = await text(model)
    system = "<|im_start|>system\nYou are a helpful clerk of the museum.<|im_end|>\n"
    assert await marked(model, Breakpoint(300, messages=1)) == system
    assert await marked(model, Breakpoint(3600, messages=4)) == whole.removesuffix("<|im_start|>assistant\n")
    part = await marked(model, Breakpoint(300, messages=2, characters=len("First part.")))
    assert part == f"{system}<|im_start|>user\nFirst part."


async def test_breakpoints_after_tools(tool_model: ServedModel) -> None:
    first = await marked(tool_model, Breakpoint(300, tools=1), tools=TOOLS)
    assert '"weather"' in first
    assert '"time"' not in first
    both = await marked(tool_model, Breakpoint(300, tools=2), tools=TOOLS)
    assert '"time"' in both
    assert "helpful clerk" not in both
    # The same tools before another conversation: the same position, except for the next message's role.
    other = await marked(tool_model, Breakpoint(300, tools=2), tools=TOOLS, messages=MESSAGES[1:2])
    assert other.rpartition("<|im_start|>")[0] == both.rpartition("<|im_start|>")[0]


async def test_token_ids_must_be_in_the_models_vocabulary(model: ServedModel) -> None:
    assert (await tokenize(model, request([5, 6]))).ids == [5, 6]
    with pytest.raises(ApiError) as exc_info:
        await tokenize(model, request([model.vocab_size]))
    assert (exc_info.value.status, exc_info.value.param) == (400, "prompt")


def text_of(model: ServedModel, ids: list[int]) -> str:
    return model.tokenizer.decode(ids, skip_special_tokens=False)


async def test_the_assistants_last_message_is_continued(tool_model: ServedModel) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "We open at"}]
    prompt = await tokenize(tool_model, request(messages, template=TemplateOptions(continues=True)))
    assert text_of(tool_model, prompt.ids).endswith("<|im_start|>assistant\nWe open at")


async def test_options_of_the_template(tool_model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(
        "{{ messages[0].content }}{% if shout %}!{% endif %}{% if add_generation_prompt %}>{% endif %}", {}
    )
    monkeypatch.setattr(tool_model.tokenizer, "_chat", template)
    one = [{"role": "user", "content": "Hello"}]
    for options, expected in (
        (TemplateOptions(), "Hello>"),
        (TemplateOptions(variables={"shout": True, "messages": []}), "Hello!>"),
        (TemplateOptions(adds_prompt=False), "Hello"),
    ):
        assert text_of(tool_model, (await tokenize(tool_model, request(one, template=options))).ids) == expected


async def test_a_truncated_prompt_keeps_its_end(model: ServedModel) -> None:
    whole = (await tokenize(model, request("One two three four five"))).ids
    last = await tokenize(model, request("One two three four five", template=TemplateOptions(max_tokens=2)))
    assert last.ids == whole[-2:]
    assert (await tokenize(model, request(whole, template=TemplateOptions(max_tokens=2)))).ids == whole[-2:]


async def test_a_prompt_is_truncated_to_the_room_beside_its_output(model: ServedModel) -> None:
    """Truncate to the context without the output, or without one token where the request has no maximum."""
    small, options = replace(model, context_length=6), TemplateOptions(max_tokens=MODEL_LENGTH)
    ids = list(range(100, 110))
    for max_tokens, room in ((None, 5), (2, 4), (6, 1), (9, 1)):
        truncated = await tokenize(small, request(ids, template=options, max_tokens=max_tokens))
        assert truncated.ids == ids[-room:]
