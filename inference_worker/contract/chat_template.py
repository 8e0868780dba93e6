"""Chat templates: Jinja that comes with a model's files, rendered in a sandbox with limits of time and memory.

Templates are rendered as transformers renders them, with the same options, globals and filters. So the tokens of a
prompt are the ones that the model was trained on.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from datetime import UTC, datetime
from types import BuiltinMethodType, MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

MAX_TEMPLATE_CHARS = 1 << 18
MAX_OUTPUT_CHARS = 1 << 25
MAX_LOOP_ROUNDS = 1_000_000  # of all loops in one rendering, and values in the lists and mappings that it makes
MAX_VALUE_CHARS = 1 << 25  # of the result of one operator, filter or method
MAX_WIDTH = 1000  # characters to which a format pads a value
_FORBIDDEN_METHODS = frozenset({"center", "encode", "expandtabs", "format_map", "ljust", "rjust", "translate", "zfill"})
# A width and a precision in a format of the operator %. A star is an argument's.
_PERCENT = re.compile(r"%(?:\([^()]*\))?[#0\- +]*(\*|\d*)(?:\.(\*|\d*))?")
_NESTED_KEY = re.compile(r"%\([^()]*\(")
_BRACKETED_BRACE = re.compile(r"\{[^{}\[]*\[[^\]]*[{}]")  # in the name of a value, where a brace has no meaning
_BRACES = re.compile(r"\{[^{}]*:([^{}]*\{?)")  # the specification of a value in `str.format`, up to a nested one
_WIDTHS = re.compile(r"\d+|\{")


class ChatTemplateError(ValueError):
    """An error of a chat template: it rejected the messages, failed on them or exceeded its limits."""


class _Bounds:
    """The remaining budget of one rendering."""

    def __init__(self) -> None:
        self.rounds = MAX_LOOP_ROUNDS

    def loop(self, values: Iterable[Any]) -> Iterable[Any]:
        """Yield `values` and charge each iteration to the budget. A known length is charged before the first
        iteration."""
        if isinstance(values, Sized):
            self._charge(len(values))
            return values
        return self._counted(values)

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._charge(1)
            yield value

    def build(self, value: Any, times: int = 1) -> Any:
        """Return `value`, and charge each value in it to the budget, as often as it occurs.

        A list can contain another one several times. So its text can be much larger than its memory.
        """
        stack = [value]
        while stack:
            inner = stack.pop()
            if isinstance(inner, list | tuple | Mapping):
                self._charge(len(inner) * times)
                stack.extend(inner.values() if isinstance(inner, Mapping) else inner)
        return value

    def _charge(self, rounds: int) -> None:
        self.rounds -= rounds
        if self.rounds < 0:
            raise jinja2.TemplateError("the chat template loops too long, or makes lists that are too large")


class _Limiter(jinja2.visitor.NodeTransformer):
    """The replacement of loops and concatenations in a template's tree by calls that check limits."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802 - the base class has such names
        self.generic_visit(node)
        node.iter = jinja2.nodes.Call(_name("__bounded", node), [node.iter], [], None, None, lineno=node.lineno)
        return node

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._counted(node, node.items)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return node if node.ctx == "store" else self._counted(node, node.items)

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return self._counted(node, [pair.value for pair in node.items])

    def _counted(self, node: jinja2.nodes.Expr, items: list[jinja2.nodes.Expr]) -> jinja2.nodes.Node:
        if all(isinstance(item, jinja2.nodes.Const) for item in items):
            return node
        return jinja2.nodes.Call(_name("__built", node), [node], [], None, None, lineno=node.lineno)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return jinja2.nodes.Call(_name("__concatenated", node), node.nodes, [], None, None, lineno=node.lineno)


def _name(name: str, node: jinja2.nodes.Node) -> jinja2.nodes.Name:
    return jinja2.nodes.Name(name, "load", lineno=node.lineno)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on loop iterations and on the size of values."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        _Limiter().visit(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if isinstance(left, _SIZED) and isinstance(right, _SIZED):
                _check_size(len(left) + len(right))
                context["__built"](min(left, right, key=len))  # a list to which values are added is counted once
            return left + right
        if operator == "*" and (_sized(left) or _sized(right)):
            size, times = (left, right) if _sized(left) else (right, left)
            _check_size(len(size) * times if isinstance(times, int) else 0)
            if isinstance(times, int) and times > 0:
                context["__built"](size, times)
        elif operator == "%" and isinstance(left, str):
            _check_percent(left, right if isinstance(right, tuple | Mapping) else (right,))
        elif operator == "**" or (operator == "%" and isinstance(left, bytes)):
            raise jinja2.TemplateError(f"the operator {operator} is not allowed in a chat template")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if (
            type(__obj) is BuiltinMethodType
            and __obj.__name__ in ("join", "replace")
            and isinstance(__obj.__self__, str)
        ):
            text, name = __obj.__self__, __obj.__name__
            args = (list(args[0]),) if name == "join" and args else args  # an iterator can be read only once
            _check_size(_joined_size(text, *args) if name == "join" else _replaced_size(text, *args, **kwargs))
        result = super().call(__context, __obj, *args, **kwargs)
        return __context["__built"](result) if __obj is dict else result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, (str, bytes, int)) and attr in (*_FORBIDDEN_METHODS, "to_bytes"):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        function = super().wrap_str_format(value)
        if function is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            if _BRACKETED_BRACE.search(value.__self__):
                raise jinja2.TemplateError("a format in the chat template has a brace in brackets")
            _check_widths(width for spec in _BRACES.findall(value.__self__) for width in _WIDTHS.findall(spec))
            _check_size(value.__self__.count("{") * (MAX_WIDTH + _longest((*args, *kwargs.values()))))
            return str(function(*args, **kwargs))

        return checked


def _check_size(size: int) -> None:
    """Check the size of a value before it is made."""
    if size > MAX_VALUE_CHARS:
        raise jinja2.TemplateError("the chat template makes a value that is too large")


def _check_text(value: Any) -> Any:
    """Return `value`, and check the size of its text if it is a list or a mapping."""
    stack, size = [value] if isinstance(value, list | tuple | Mapping) else [], 0
    while stack:
        inner = stack.pop()
        if isinstance(inner, list | tuple):
            stack.extend(inner)
        elif isinstance(inner, Mapping):
            stack.extend((*inner, *inner.values()))
        size += len(inner) if isinstance(inner, str) else 1
        _check_size(size)
    return value


def _to_text(value: Any) -> str:
    return value if isinstance(value, str) else str(_check_text(value))


def _with_check(text_filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that makes a text of its value, with a check of its size."""

    @functools.wraps(text_filter)  # also copies the attribute by which Jinja passes the environment
    def checked(*args: Any, **kwargs: Any) -> Any:
        return text_filter(*map(_check_text, args), **kwargs)

    return checked


def _check_percent(form: str, values: tuple[Any, ...] | Mapping[str, Any]) -> None:
    """Check the size of a text that the operator % makes."""
    if _NESTED_KEY.search(form):
        raise jinja2.TemplateError("a key of a format in the chat template has parentheses")
    found = _PERCENT.findall(form)
    _check_widths(width for pair in found for width in pair if width)
    longest = _longest(values.values() if isinstance(values, Mapping) else values)
    _check_size(len(form) + len(found) * (MAX_WIDTH + longest))


def _check_widths(widths: Iterable[str]) -> None:
    for width in widths:
        if not width.isdecimal() or len(width) > 4 or int(width) > MAX_WIDTH:
            raise jinja2.TemplateError(f"a format in the chat template pads to {width[:9]}; at most {MAX_WIDTH}")


def _longest(values: Iterable[Any]) -> int:
    return max((len(_to_text(value)) for value in values), default=0)


def _joined_size(separator: str, values: Any = ()) -> int:
    values = list(values)
    return sum(len(_to_text(value)) for value in values) + len(values) * len(separator)


def _replaced_size(text: str, old: str = "", new: str = "", count: Any = None, **_: Any) -> int:
    return len(text) + (text.count(old) + 1) * len(new)


def _concatenated(*values: Any) -> str:
    texts = [_to_text(value) for value in values]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _format_filter(value: str, *args: Any, **kwargs: Any) -> str:
    _check_percent(str(value), kwargs or args)
    return str(jinja2.filters.do_format(value, *args, **kwargs))


def _center_filter(value: str, width: int = 80) -> str:
    _check_size(width)
    return jinja2.filters.do_center(value, width)


def _indent_filter(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_size(len(s) + (len(s.splitlines()) + 1) * (width if isinstance(width, int) else len(width)))
    return jinja2.filters.do_indent(s, width, first, blank)


@jinja2.pass_eval_context
def _join_filter(
    eval_ctx: jinja2.nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    values = list(value)
    if attribute is None:
        _check_size(_joined_size(d, values))
    return str(jinja2.filters.do_join(eval_ctx, values, d, attribute))


@jinja2.pass_eval_context
def _replace_filter(eval_ctx: jinja2.nodes.EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
    _check_size(_replaced_size(str(s), str(old), str(new)))
    return jinja2.filters.do_replace(eval_ctx, s, old, new, count)


@jinja2.pass_environment
def _sum_filter(
    environment: jinja2.Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    if not isinstance(start, int | float):
        raise jinja2.TemplateError("sum: start must be a number in a chat template")
    return jinja2.filters.sync_do_sum(environment, iterable, attribute, start)


# Filters that make large values from small ones, with a check. Those that no template needs are removed.
_CHECKED_FILTERS: Mapping[str, Callable[..., Any]] = {
    "center": _center_filter,
    "format": _format_filter,
    "indent": _indent_filter,
    "join": _join_filter,
    "replace": _replace_filter,
    "sum": _sum_filter,
}
_TEXT_FILTERS = (
    "capitalize", "e", "escape", "forceescape", "lower", "pprint", "safe", "string", "striptags", "title", "trim",
    "truncate", "upper", "urlencode", "urlize", "wordcount", "xmlattr",
)  # fmt: skip
_REMOVED_FILTERS = ("batch", "slice", "wordwrap")


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}…{% endgeneration %}`, which marks the assistant's text for training. It renders its
    content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_SIZED = (str, bytes, list, tuple)


def _sized(value: Any) -> bool:
    return isinstance(value, _SIZED)


class _Namespace(jinja2.utils.Namespace):
    """A namespace whose text does not contain its values."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes for HTML; a prompt must not be.
    if isinstance(indent, str) or (indent or 0) > 16:
        raise jinja2.TemplateError("tojson: indent is too large")
    return json.dumps(
        _check_text(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now(UTC).strftime(form[:256])


class ChatTemplate:
    """A compiled chat template. Every rendering receives `variables`, such as bos_token."""

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(f"the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}")
        environment = _Environment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=_check_text,
        )
        environment.filters.update({name: _with_check(environment.filters[name]) for name in _TEXT_FILTERS})
        for name in _REMOVED_FILTERS:
            environment.filters.pop(name)
        environment.filters.update({**_CHECKED_FILTERS, "tojson": _to_json})
        environment.globals.pop("lipsum")
        functions: dict[str, Callable[..., Any]] = {
            "raise_exception": _raise_exception, "strftime_now": _strftime_now, "namespace": _Namespace
        }  # fmt: skip
        environment.globals.update(functions)
        try:
            self._template = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # copied by each rendering; a ChainMap is slower
        except (jinja2.TemplateError, RecursionError) as exc:
            raise ChatTemplateError(f"the chat template does not compile: {exc}") from None
        self._variables = variables
        named = jinja2.meta.find_undeclared_variables(environment.parse(source))
        self.takes_tools = "tools" in named  # other templates ignore tools silently

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_prompt: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the prompt's text. `variables` are further variables, which override none of the others.

        Raises:
            ChatTemplateError: the template rejected the messages or exceeded its limits.
        """
        pieces: list[str] = []
        room, bounds = MAX_OUTPUT_CHARS, _Bounds()
        try:
            for piece in self._template.generate(
                {
                    **variables,
                    **self._variables,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_prompt,
                    "__bounded": bounds.loop,
                    "__built": bounds.build,
                    "__concatenated": _concatenated,
                }
            ):
                room -= len(piece)
                if room < 0:
                    raise ChatTemplateError("the rendered messages are too long")
                pieces.append(piece)
        except ChatTemplateError:
            raise
        # A template is code that runs on the caller's input, so every exception is an error of that input.
        except Exception as exc:  # noqa: BLE001
            raise ChatTemplateError(str(exc) or type(exc).__name__) from None
        return "".join(pieces)
