"""Chat templates render as in transformers and are sandboxed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from inference_worker.checkpoints.chat_template import ChatTemplate, ChatTemplateError

DATA = Path(__file__).parents[2] / "data" / "chat_templates"
MESSAGES = [
    {"role": "system", "content": "Be brief. <b>&</b>"},
    {"role": "user", "content": "Wie heißt du? 漢字"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": "é<&>"}}}]},
    {"role": "tool", "content": "42"},
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "F.", "parameters": {"type": "object", "properties": {}}},
    }
]
TEMPLATES = {
    "chatml": """{% for m in messages %}
<|im_start|>{{ m['role'] }}
{{ m.content or '' }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "tools": """{{ bos_token }}{%- if tools %}
    {%- for tool in tools %}{{ tool | tojson }}
{{ tool | tojson(indent=2) }}{% endfor %}
{%- endif %}
{%- for m in messages if m.tool_calls is defined %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}""",
    "loops": """{%- set ns = namespace(n=0) -%}
{%- for m in messages -%}
  {%- if m.role == 'tool' -%}{%- break -%}{%- endif -%}
  {%- if m.role == 'system' -%}{%- continue -%}{%- endif -%}
  {%- set ns.n = ns.n + 1 -%}
  {{ loop.index0 }}/{{ loop.length }}{{ loop.last }}{{ loop.previtem.role }}
{%- endfor -%}
{{ ns.n }}{{ messages | map(attribute='role') | join(',') }}{{ (messages | first).role }}{{ 3 * 'ab' }}""",
    "generation": """{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}""",
    "formats": """{{ '%5.2f|%-4s|%%|%d' | format(3.14159, 'ab', 7) }}{{ '%(a)s-%(b)03d' | format(a='x', b=7) }}
{{- '%s and %r' % ('x', 'y') }}{{ '{:>5}|{x:.2f}|{{}}'.format('a', x=1.5) }}{{ 'a\nb' | indent(2, true) }}
{{- 'a' | center(5) }}{{ [1, 'b'] | join(', ') }}{{ messages | join('-', attribute='role') }}
{{- 'aXa' | replace('X', 'y') }}{{ 'aXaXa'.replace('X', 'y', 1) }}{{ ', '.join(['a', 'b']) }}
{{- 1 ~ none ~ missing ~ 'b' }}{{ ('a' ~ 'b') | upper }}{{ '%s' | format(messages[0].content) }}""",
    "set": """{% set notes %}[{{ messages[0].role }}]{% endset %}{{ notes }}
{%- for m in messages | selectattr('role', 'in', ['user', 'tool']) | list %}{{ m.role | capitalize }}
{%- else %}-{% endfor %}
{%- for m in messages | rejectattr('role', 'equalto', 'user') %}{{ loop.cycle('a', 'b') }}{{ m.role | title }}
{%- endfor %}
{%- if tools is not none and tools is iterable %}{{ tools | length }}{% endif %}{{ [3, 1, 2] | sort | reverse | list }}
{%- macro wrapped() %}{{ caller('in') }}{% endmacro %}{% call(x) wrapped() %}<{{ x }}>{% endcall %}
{{- {'b': 1, 'a': 2} | dictsort | first | string }}{{ messages[0].get('content') | default('none', true) | trim }}""",
    "json": """{{ {'b': 'é<', 'a': [1, none]} | tojson }}{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}
{{- [1, {'a': 'é'}] | tojson(indent=4, ensure_ascii=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}""",
    "time": """{{ strftime_now('%Y') }}{{ strftime_now('%d %B %Y') is string }}""",
    "slices": """{{ messages[1:] | length }}{{ messages[0].content.split('.')[0] | trim | upper }}{{ undefined_name }}
{%- for key, value in {'b': 1, 'a': 2}.items() %}{{ key }}{{ value }}{% endfor %}
{%- macro turn(m) %}[{{ m.role }}]{% endmacro %}{{ turn(messages[1]) }}{% for i in range(3) %}{{ i }}{% endfor %}""",
}


# Steps that double the text of a value, and uses of a list whose text is large.
NESTED = (
    "{% set n.s = [n.s, n.s] %}",
    "{% set n.s = (n.s, n.s) %}",
    "{% set n.s = {'a': n.s, 'b': n.s} %}",
    "{% set n.s = dict(a=n.s, b=n.s) %}",
    "{% set n.s = [[n.s] * 2] %}",
    "{% set n.s = [n.s + n.s] %}",
)
USES = ("{{ a }}", "{{ a ~ 1 }}", "{{ a | string }}", "{{ a | tojson }}", "{{ '%s' % (a,) }}", "{{ [a] | join }}")


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_rendering_equals_transformers(name: str, tools: Any) -> None:
    theirs, _ = render_jinja_template(
        [MESSAGES], tools=tools, chat_template=TEMPLATES[name], add_generation_prompt=True, bos_token="<s>"
    )
    ours = ChatTemplate(TEMPLATES[name], {"bos_token": "<s>"}).render(MESSAGES, tools, True)
    assert ours == theirs[0]


@pytest.mark.parametrize("path", sorted(DATA.glob("*.jinja")), ids=lambda path: path.stem)
def test_rendering_of_the_families_templates_equals_transformers(path: Path) -> None:
    source, variables = path.read_text(), {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2024"}
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {"x": "é<&>", "n": 3}}}
    messages = [
        {"role": "system", "content": "Be brief. <b>&</b>"},
        {"role": "user", "content": "Wie heißt du? 漢字"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "call00000", "name": "f"},
        {"role": "assistant", "content": "Odin."},
        {"role": "user", "content": "Ja?"},
    ]
    for tools in (None, TOOLS):
        for switch in ({}, {"enable_thinking": False, "thinking": False}, {"enable_thinking": True, "thinking": True}):
            theirs, _ = render_jinja_template(
                [messages], tools=tools, chat_template=source, add_generation_prompt=True, **variables, **switch
            )
            assert ChatTemplate(source, variables).render(messages, tools, True, switch) == theirs[0]


def test_a_template_can_reject_its_messages() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        template.render(MESSAGES, None, True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in messages %}{% for b in range(99999) %}{% for c in 'x' * 99 %}{% endfor %}{% endfor %}{% endfor %}",
        "{{ 'x' * 999999999 }}",
        "{{ 999999999 * [1] }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ '%999999999d' % 1 }}",
        "{{ 'x'.rjust(999999999) }}",
        "{{ messages | tojson(indent=999999999) }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% include 'x' %}",
        "{{ messages[0].role + 1 }}",
        "{{ '%99999d' | format(1) }}",
        "{{ '%*d' % (99999, 1) }}",
        "{{ ('%(a)s' * 1000) | format(a='x' * 100000) }}",
        "{{ '{:>99999999}'.format(1) }}",
        "{{ '{:{}}'.format('a', 99999999) }}",
        "{{ ('a' * 10000).replace('a', 'x' * 100000) }}",
        "{{ ('a' * 10000) | replace('a', 'x' * 100000) }}",
        "{{ (['a' * 10000] * 10000) | join('x') }}",
        "{{ ('a' * 10000).join('b' * 10000) }}",
        "{{ ('a\\n' * 10000) | indent(99999) }}",
        "{{ (1).to_bytes(999999999) }}",
        "{{ ('a' * 9999999).translate({97: 'b' * 100}) }}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{{ lipsum(9999) }}",
        "{{ '%(a(b))999999999s' % {'a(b)': 1} }}",
        "{{ '{0[}]:999999999}'.format({'}': 1}) }}",
        "{{ ([[0] * 1000000] * 1000) | sum(start=[]) }}",
        *("{% set n = namespace(s=[1]) %}{% for i in range(99) %}" + step + "{% endfor %}{{ n.s }}" for step in NESTED),
        *("{% set a = ['x' * 9999999] * 9999 %}" + use for use in USES),
    ],
    ids=range(32 + len(NESTED) + len(USES)),
)
def test_a_malicious_template_fails_fast(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render(MESSAGES, None, True)


def test_lists_are_made_within_the_limits() -> None:
    """Check that a list to which a template adds each message is not charged for all of them in each round."""
    source = "{% set n = namespace(s=[]) %}{% for m in messages %}{% set n.s = n.s + [m] %}{% endfor %}"
    source += "{{ n.s | length }}{{ n }}{{ [n] }}"
    assert ChatTemplate(source, {}).render(MESSAGES * 1000, None, True) == "4000<Namespace>[<Namespace>]"


def test_formats_and_sums_are_rendered() -> None:
    source = "{{ '[{}] {a[b]:>2}'.format(1, a={'b': 2}) }} {{ '%(a)2d' % {'a': 3} }} {{ [1, 2] | sum }}"
    assert ChatTemplate(source, {}).render(MESSAGES, None, True) == "[1]  2  3 3"


def test_a_templates_output_is_limited() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}", {})
    with pytest.raises(ChatTemplateError, match="too much work"):
        template.render([{"role": "user", "content": "x" * 1000}], None, True)


@pytest.mark.parametrize("source", ["{% if %}", "{{ [1] | batch(99) }}", "{% unknown %}", "x" * 300_000], ids=range(4))
def test_a_template_that_cannot_be_compiled_is_an_error(source: str) -> None:
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {})
