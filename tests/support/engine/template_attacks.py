"""Templates that use each construct of the sandbox as expensively as they can.

The constructs come from the sandbox: its filters, tests, globals, operators, and the methods that it admits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.utils
from markupsafe import Markup

from inference_worker.checkpoints.template_sandbox import SandboxEnvironment

# Operands by name. `n.v` is a value that the prelude of a case has grown.
SETUP = """{%- macro callee(x=0) %}{{ x }}{% if varargs %}{% endif %}{% endmacro -%}
{%- set n = namespace(v='ab' * SIZE, l=[1], t=(1,), d={'a': 1}, i=9000000000000000000000000000) -%}
{%- for i in range(GROWTH) -%}
{%- set n.l = [n.l, n.l] %}{% set n.t = (n.t, n.t) %}{% set n.d = {'a': n.d, 'b': n.d} -%}
{%- endfor -%}
{%- set long, words, wide = 'a' * SIZE, 'a b' * SIZE, 'é😀' * SIZE -%}
{%- set marks, numbers = '%s{}<a>' * (SIZE // 8), [3, 1, 2] * (SIZE // 8) -%}
{%- set texts, objects = ['b' * 9, 'a' * 9] * (SIZE // 16), [{'role': 'b'}, {'role': 'a'}] * (SIZE // 16) -%}
"""
OPERANDS = (
    "long",
    "words",
    "wide",
    "marks",
    "numbers",
    "texts",
    "objects",
    "messages",
    "messages[0]",
    "n.v",
    "n.l",
    "n.t",
    "n.d",
    "n.i",
    "n",
    "range(9999)",
    "objects|map(attribute='role')",
    "n.d.values()",
    "words|safe",
    "1e300",
    "none",
    "missing",
    "callee",
    "loop",
    "true",
)
ARGUMENTS = (
    "",
    "n.v",
    "'a'",
    "'role'",
    "long",
    "long, 'bb'",
    "'a', long",
    "-99999999",
    "99999999",
    "n.l",
    "texts",
    "n.d.items()",
    "n.t, n.t",
    "'role', 'in', texts",
    "'upper'",
    "attribute='role.a.a.a.a.a.a'",
    "16",
    "long, long, 9999",
)
SHORT_ARGUMENTS = ("", "n.v", "long", "99999999", "n.l", "texts", "'a', long")
OPERATORS = (*sorted(SandboxEnvironment.intercepted_binops), "~", "and", "or", "if n.i else")
COMPARISONS = ("==", "!=", "<", ">=", "in", "not in")
TYPES: Mapping[str, Any] = {
    "long": "",
    "words": "",
    "wide": "",
    "words|safe": Markup(),
    "numbers": [],
    "n.t": (),
    "n.d": {},
    "n.d.keys()": {}.keys(),
    "n.d.values()": {}.values(),
    "n.d.items()": {}.items(),
    "n.i": 1,
    "1.5e300": 1.5,
    "true": True,
    "range(9999)": range(1),
    "n": jinja2.utils.Namespace(),
    "cycler(long, words)": jinja2.utils.Cycler(1),
    "joiner(long)": jinja2.utils.Joiner(),
    "callee": jinja2.runtime.Macro,
    "loop": jinja2.runtime.LoopContext([], jinja2.Undefined),
    "(objects|map(attribute='role'))": (item for item in [1]),
    "missing": jinja2.Undefined(),
    "self": jinja2.runtime.TemplateReference,
    "raise_exception": len,
}
FORMS = {
    "loop": "{% for i in range(9999) %}{% for j in range(9999) %}{% set x = E %}{% endfor %}{% endfor %}",
    "filtered loop": "{% for i in range(9999) %}{% for j in range(9999) if E and false %}{% endfor %}{% endfor %}",
    "macro": "{% macro m(k) %}{% set x = E %}{% if k %}{{ m(k - 1) }}{{ m(k - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "recursive loop": "{% for i in [1, 2] recursive %}{% set x = E %}{% if loop.depth < 60 %}"
    "{{ loop([1, 2]) }}{% endif %}"
    "{% endfor %}",
    "growing": "{% for i in range(99) %}{% set n.v = E %}{% endfor %}{{ n.v }}",
    "output": "{% for i in range(9999) %}{{ E }}{% endfor %}",
}
LOOPS, END = "{% for i in range(9999) %}{% for j in range(9999) %}", "{% endfor %}{% endfor %}"
STATEMENTS = {
    "self-doubling macro": "{% macro m(k) %}{% if k %}{{ m(k - 1) }}{{ m(k - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "caller": "{% macro m(k) %}{{ caller() }}{% if k %}{% call m(k - 1) %}{{ k }}{% endcall %}"
    "{% call m(k - 1) %}{{ k }}{% endcall %}"
    "{% endif %}{% endmacro %}{% call m(60) %}x{% endcall %}",
    "recursive loop": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "loop of a loop": "{% for i in numbers recursive %}{{ loop(loop) }}{% for j in loop %}{% endfor %}{% endfor %}",
    "list of a loop": "{% for k in range(9999) %}{% for i in range(9999) %}"
    "{% set x = callee(*loop) %}{% endfor %}{% endfor %}",
    "squaring": "{% set n = namespace(i=3) %}{% for i in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}{{ n.i }}",
    "empty loop": LOOPS + END,
    "branches": LOOPS + "{% if missing %}{% endif %}" * 999 + END,
    "texts": "{% for i in range(9999) %}{% for j in range(9999) %}{% set x %}" + "text " * 9999 + "{% endset %}" + END,
    "undefined": LOOPS + "{{ missing }}" * 99 + END,
    "attributes": LOOPS + "{{ n.d.a.a.c }}" * 99 + END,
    "macros": LOOPS + "{% macro a(x, y=1) %}{% endmacro %}" * 99 + END,
    "loops": LOOPS + "{% for k in [] %}{{ loop }}{% endfor %}" * 99 + END,
    "literals": LOOPS + "{% set x = [" + "[], {}, (i,), " * 99 + "] %}" + END,
    "doubling block": "{% set n = namespace(v='ab') %}{% for i in range(99) %}{% set x %}{{ n.v }}{{ n.v }}"
    "{% endset %}{% set n.v = x %}"
    "{% endfor %}",
    "filter block": "{% for i in range(9999) %}{% filter upper %}{{ long }}{% endfilter %}{% endfor %}",
    "assigned filter block": "{% for i in range(9999) %}{% set x | title %}{{ long }}{% endset %}{% endfor %}",
    "unpacking": "{% for i in range(9999) %}{{ callee(*numbers) }}{{ dict(**objects[0]) }}{% endfor %}",
    "with": "{% for i in range(9999) %}{% with a = n.l, b = long + long %}"
    "{% if a == n.l %}{% endif %}{% endwith %}{% endfor %}",
    "error of a value": "{{ [1][n.l] + 1 }}",
    "error of a key": "{{ {}[n.t] }}{{ {n.t: 1} }}",
    "error of a message": "{{ raise_exception(n.l) }}",
    "deep tuple": "{% set m = namespace(t=()) %}{% for i in range(9999) %}{% set m.t = (m.t,) %}{% endfor %}"
    "{{ m.t in {} }}{{ m.t }}",
    "chain": "{% for i in range(9999) %}{% if n.l < n.l < n.l == n.l %}{% endif %}{% endfor %}",
    "equal hashes": "{{ [" + "".join(f"({k}, {k * (2**61 - 1)})," for k in range(999)) + "] | unique | list }}",
}


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the name and the expression of each use of a construct."""
    environment = SandboxEnvironment()
    for name in sorted(environment.filters):
        if not name.startswith("("):
            for operand in OPERANDS:
                for argument in ARGUMENTS:
                    yield f"filter {name}", f"({operand}) | {name}({argument})"
                    if argument == "":
                        yield f"filter {name}", f"({operand}) | {name} | list"
    for name in sorted(environment.tests):
        for operand in OPERANDS:
            for argument in SHORT_ARGUMENTS:
                if name.isalpha():
                    yield f"test {name}", f"({operand}) is {name}" + (f"({argument})" if argument else "")
                yield f"test {name}", f"[{operand}] | select({', '.join(filter(None, (repr(name), argument)))}) | list"
    for name in sorted(environment.globals):
        for argument in (*ARGUMENTS, "**n.d", "*texts", "texts", "a=n.l", "'%999999Y' * 99"):
            yield f"global {name}", f"{name}({argument})"
    for symbol in (*OPERATORS, *COMPARISONS):
        for left in OPERANDS:
            for right in OPERANDS:
                yield f"operator {symbol}", f"({left}) {symbol} ({right})" + (" else 0" if "if" in symbol else "")
    for operand in OPERANDS:
        for form in (
            "-({})",
            "+({})",
            "not ({})",
            "({})[::-1]",
            "({})[1:]",
            "({})[n.l]",
            "{{n.v: 1}}[{}]",
            "{{({}): 1}}",
            "[{}] * 9999",
        ):
            yield f"operator {form}", form.format(operand)
    for operand, value in TYPES.items():
        for name in dir(value):
            attribute = getattr(value, name, None)
            if environment.is_safe_attribute(value, name, attribute):
                if callable(attribute):
                    for argument in (*ARGUMENTS, "n.d", "[n.t]"):
                        yield f"method {type(value).__name__}.{name}", f"({operand}).{name}({argument})"
                else:
                    yield f"attribute {type(value).__name__}.{name}", f"({operand}).{name}"


def set_sizes(source: str, size: int, growth: int) -> str:
    """Return the source with the size of its texts and lists, and the number of times that nested lists double."""
    return source.replace("SIZE", str(size)).replace("GROWTH", str(growth))
