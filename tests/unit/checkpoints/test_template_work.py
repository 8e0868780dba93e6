"""Each construct of the chat templates' sandbox ends within its budget of work, and long conversations are rendered.

`TEMPLATE_EXAMPLES` sets the number of templates for each construct.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from inference_worker.checkpoints.chat_template import ChatTemplate, ChatTemplateError, ChatTemplateWorkError
from inference_worker.checkpoints.gguf_fields import Fields
from inference_worker.checkpoints.gguf_file import GGUFFile
from inference_worker.checkpoints.gguf_tokenizer import write_tokenizer
from inference_worker.checkpoints.template_work import BASE_UNITS, WorkBudget
from inference_worker.checkpoints.tokenizer import Tokenizer, byte_alphabet
from tests.support.engine.template_attacks import (
    ARGUMENTS,
    COMPARISONS,
    FORMS,
    OPERANDS,
    SETUP,
    STATEMENTS,
    expressions,
    set_sizes,
)

DATA = Path(__file__).parents[2] / "data" / "chat_templates"
EXAMPLES = int(os.environ.get("TEMPLATE_EXAMPLES", "3"))
UNITS = 20_000  # about 2 ms
MAX_SECONDS = 1.0  # of CPU time: far more than any construct takes, and far less than one that is not charged
MESSAGES = [{"role": "user", "content": "x" * 20}]
# Operands that are small, or that are lists whose text is exponentially larger than their memory.
SIZES = ((4000, 2), (200, 25))
CONSTRUCTS: defaultdict[str, list[str]] = defaultdict(list)
for _name, _expression in expressions():
    CONSTRUCTS[_name].append(_expression)
_NAMES = {
    kind: sorted({name.split(".")[-1].removeprefix(f"{kind} ") for name in CONSTRUCTS if name.startswith(kind)})
    for kind in ("filter", "test", "method")
}
_NAMES["test"] = [name for name in _NAMES["test"] if name.isalpha()]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2024"}

pytestmark = pytest.mark.usefixtures("frozen_heap")


def check(source: str, units: int = UNITS) -> None:
    """Check that a template ends or is refused within a budget."""
    try:
        template = ChatTemplate(source, {})
    except ChatTemplateError:
        return
    budget, start = WorkBudget(units), time.thread_time()
    try:
        template.render(MESSAGES, None, True, budget=budget)
    except ChatTemplateWorkError:
        assert budget.units < 0
    except ChatTemplateError:
        pass
    assert time.thread_time() - start < MAX_SECONDS, source


@pytest.mark.parametrize("name", sorted(CONSTRUCTS))
def test_each_construct_ends_within_its_budget(name: str) -> None:
    choices = random.Random(name)
    for number in range(EXAMPLES):
        form = choices.choice(list(FORMS.values()))
        expression = choices.choice(CONSTRUCTS[name])
        check(set_sizes(SETUP + form.replace("E", expression), *SIZES[number % len(SIZES)]))


@pytest.mark.parametrize("name", sorted(STATEMENTS))
@pytest.mark.parametrize("sizes", SIZES, ids=("texts", "lists"))
def test_each_statement_ends_within_the_budget_of_a_small_prompt(name: str, sizes: tuple[int, int]) -> None:
    check(set_sizes(SETUP + STATEMENTS[name], *sizes), WorkBudget.for_input(MESSAGES).units)


compositions = st.recursive(
    st.sampled_from(OPERANDS),
    lambda inner: st.one_of(
        st.builds("({}) | {}({})".format, inner, st.sampled_from(_NAMES["filter"]), st.sampled_from(ARGUMENTS)),
        st.builds("({}) is {}({})".format, inner, st.sampled_from(_NAMES["test"]), inner),
        st.builds("({}).{}({})".format, inner, st.sampled_from(_NAMES["method"]), st.one_of(inner, st.just(""))),
        st.builds("({}) {} ({})".format, inner, st.sampled_from(("+", "*", "%", "~", *COMPARISONS)), inner),
        st.builds("[{}, {}]".format, inner, inner),
        st.builds("{{'a': {}, ({}): 1}}".format, inner, inner),
        st.builds("({})[({}):({})]".format, inner, inner, inner),
    ),
    max_leaves=6,
)


@settings(max_examples=50 * EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(compositions, st.sampled_from(sorted(FORMS)), st.sampled_from(SIZES))
def test_compositions_end_within_their_budget(expression: str, form: str, sizes: tuple[int, int]) -> None:
    check(set_sizes(SETUP + FORMS[form].replace("E", expression), *sizes))


def test_a_gguf_files_template_has_the_same_budget(tmp_path: Path) -> None:
    for name, source in STATEMENTS.items():
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
        writer.add_context_length(512)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*byte_alphabet(), "ab"])
        writer.add_token_types([gguf.TokenType.NORMAL] * (len(byte_alphabet()) + 1))
        writer.add_token_merges(["a b"])
        writer.add_chat_template(set_sizes(SETUP + source, 200, 25))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with GGUFFile(tmp_path / "a.gguf") as file:
            write_tokenizer(Fields(file), tmp_path)
        tokenizer, start = Tokenizer.from_dir(tmp_path), time.thread_time()
        with contextlib.suppress(ChatTemplateError):
            tokenizer.render_chat(MESSAGES)
        assert time.thread_time() - start < MAX_SECONDS, name


def test_the_work_of_a_small_prompt_is_limited() -> None:
    source = "{% macro m(k) %}{% if k %}{{ m(k - 1) }}{{ m(k - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    with pytest.raises(ChatTemplateWorkError, match="too much work"):
        ChatTemplate(source, {}).render(MESSAGES, None, True)
    assert WorkBudget.for_input(MESSAGES).units < 1.2 * BASE_UNITS


def conversation(turns: int, text: str) -> list[dict[str, Any]]:
    pair = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    return [{"role": "system", "content": "Be brief."}, *(pair * turns), {"role": "user", "content": text}]


def tool_calls(turns: int) -> list[dict[str, Any]]:
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": "é<&>", "n": 3}}}
    turn: list[dict[str, Any]] = [
        {"role": "user", "content": "Ja?"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "call00000", "name": "f"},
        {"role": "assistant", "content": "Odin."},
    ]
    return [{"role": "system", "content": "Be brief."}, *(turn * turns)]


def tools(number: int) -> list[dict[str, Any]]:
    properties = {f"p{n}": {"type": "string", "description": "A field. " * 5, "enum": ["a", "b"]} for n in range(8)}
    parameters = {"type": "object", "properties": properties, "required": ["p1"]}
    functions = ({"name": f"f{n}", "description": "A tool. " * 20, "parameters": parameters} for n in range(number))
    return [{"type": "function", "function": function} for function in functions]


@pytest.mark.parametrize("path", sorted(DATA.glob("*.jinja")), ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("messages", "functions"),
    [
        (conversation(1000, "Hello there"), None),
        (conversation(2, "Some <think> words\n and such. " * 4000), None),
        (conversation(1, "Hi"), tools(100)),
        (tool_calls(250), tools(2)),
    ],
    ids=("messages", "characters", "tools", "tool calls"),
)
def test_long_conversations_are_rendered(path: Path, messages: list[dict[str, Any]], functions: Any) -> None:
    if path.stem == "gemma4":
        messages = messages[:501]  # its work grows with the square of the number of messages
    budget = WorkBudget.for_input(messages, functions)
    try:
        assert ChatTemplate(path.read_text(), VARIABLES).render(messages, functions, True, budget=budget)
    except ChatTemplateWorkError:
        raise
    except ChatTemplateError as exc:  # a family that calls one tool at a time
        assert "single tool" in str(exc) or "roles must alternate" in str(exc)
