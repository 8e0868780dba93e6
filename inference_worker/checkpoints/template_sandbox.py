"""The sandbox of chat templates: Jinja in which each operation is charged to a budget of work.

Statements are charged by their number of nodes in the template's tree, once for each time that their block runs.
Operators, comparisons, calls, filters and tests are also charged by the size of their operands and of their result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MappingView
from datetime import UTC, datetime
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

from inference_worker.checkpoints.template_filters import charge_filters, charge_tests
from inference_worker.checkpoints.template_formats import TextFormat, charge_percent
from inference_worker.checkpoints.template_work import (
    CALL_UNITS,
    CHARACTERS_COPIED,
    WorkBudget,
    WorkContext,
    check_int,
    check_key,
)

NODE_UNITS = 1  # units of a node in the tree, without what it is charged for its operands
# Of the nodes that cost more.
_NODE_UNITS: Mapping[type[jinja2.nodes.Node], int] = {
    jinja2.nodes.CallBlock: 30,
    jinja2.nodes.Call: 10,
    jinja2.nodes.Filter: 10,
    jinja2.nodes.For: 15,
    jinja2.nodes.Getattr: 12,
    jinja2.nodes.Getitem: 12,
    jinja2.nodes.Macro: 20,
    jinja2.nodes.Name: 2,
    jinja2.nodes.Output: 6,
    jinja2.nodes.Test: 5,
}
MACRO_UNITS = 30  # more of a call of a macro
BLOCK_UNITS = 3
MIN_BLOCK_UNITS = 30  # a branch that costs less is charged with the block around it
MAX_CONST_CHARS = 64  # characters of a constant whose comparison costs no more than its node
_FORBIDDEN_METHODS = frozenset(
    {"center", "encode", "expandtabs", "format_map", "fromkeys", "ljust", "rjust", "striptags", "to_bytes", "translate"}
    | {"zfill"}
)
_FORBIDDEN_NODES = (
    jinja2.nodes.Block,
    jinja2.nodes.Extends,
    jinja2.nodes.Include,
    jinja2.nodes.Import,
    jinja2.nodes.FromImport,
    jinja2.nodes.EvalContextModifier,
)
_NUMBERS = (int, float)
_COPIED = (str, list, tuple)
_METHODS = (BuiltinMethodType, MethodType)


class _Charges(jinja2.visitor.NodeTransformer):
    """The insertion of charges into a template's tree. `units` is the cost of the statements outside of blocks."""

    def __init__(self) -> None:
        self.units = 0

    def generic_visit(self, node: jinja2.nodes.Node, *args: Any, **kwargs: Any) -> jinja2.nodes.Node:
        if isinstance(node, _FORBIDDEN_NODES):
            raise jinja2.TemplateSyntaxError("this statement is not allowed in a chat template", node.lineno)
        self.units += _NODE_UNITS.get(type(node), NODE_UNITS)
        for name, value in node.iter_fields():
            if isinstance(value, str):
                self.units += len(value) // CHARACTERS_COPIED
            elif name in ("body", "else_") and isinstance(value, list):
                runs_again = name == "body" and isinstance(
                    node, jinja2.nodes.For | jinja2.nodes.Macro | jinja2.nodes.CallBlock
                )
                setattr(node, name, self._charge_block(value, 0 if runs_again else MIN_BLOCK_UNITS))
            elif isinstance(value, jinja2.nodes.Node):
                setattr(node, name, self.visit(value))
            elif isinstance(value, list):
                value[:] = [self.visit(item) if isinstance(item, jinja2.nodes.Node) else item for item in value]
        return node

    def _charge_block(self, body: list[jinja2.nodes.Node], min_units: int) -> list[jinja2.nodes.Node]:
        """Return the block with a charge at its start; if it costs less than `min_units`, with one around it."""
        around, self.units = self.units, BLOCK_UNITS
        visited = [self.visit(node) for node in body]
        units, self.units = self.units, around
        if units < min_units:
            self.units += units
            return visited
        charge = _apply("(charge)", jinja2.nodes.Const(None), jinja2.nodes.Const(units))
        return [jinja2.nodes.ExprStmt(charge), *visited]

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:  # noqa: N802 - the base class has such names
        before = self.units
        if node.test is not None:  # it runs for each value
            node.test = self.visit(node.test)
            units, self.units = self.units - before, before
            test, node.test = _apply("(charge)", node.test, jinja2.nodes.Const(units + CALL_UNITS)), None
        else:
            test = None
        self.generic_visit(node)
        node.iter, node.test = _apply("(iterate)", node.iter), test
        return node

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if len(node.ops) > 1:
            node.expr = _apply("(operand)", node.expr)
            for each in node.ops:
                each.expr = _apply("(operand)", each.expr)
            return node
        left, (only,) = node.expr, node.ops
        if only.op in ("in", "notin"):
            is_small = isinstance(only.expr, jinja2.nodes.List | jinja2.nodes.Tuple) and all(
                _is_small(item) for item in only.expr.items
            )
        else:
            is_small = _is_small(left) or _is_small(only.expr)
        return node if is_small else _apply("(compare)", left, jinja2.nodes.Const(only.op), only.expr)

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, jinja2.nodes.Slice):
            return _apply("(slice)", node)
        if not _is_small(node.arg):
            node.arg = _apply("(key)", node.arg)
        return node

    def visit_Pair(self, node: jinja2.nodes.Pair) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not _is_small(node.key):
            node.key = _apply("(key)", node.key)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _apply("(concatenate)", jinja2.nodes.List(node.nodes))


def _apply(name: str, value: Any, *args: jinja2.nodes.Expr) -> jinja2.nodes.Filter:
    """Return the node of an internal filter. Its name is none that a template can write."""
    return jinja2.nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno or 1)


def _is_small(node: jinja2.nodes.Expr) -> bool:
    if isinstance(node, jinja2.nodes.Neg):
        node = node.node
    return isinstance(node, jinja2.nodes.Const) and len(str(node.value)) <= MAX_CONST_CHARS


class SandboxEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget of work."""

    context_class = WorkContext
    intercepted_binops = frozenset(jinja2.sandbox.SandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
            finalize=_finalize,
        )
        self.block_units = 0  # units of the statements outside of blocks in the template that was parsed last
        charge_filters(self.filters)
        charge_tests(self.tests)
        self.globals.pop("lipsum")
        functions: dict[str, Callable[..., Any]] = {
            "dict": _make_dict, "namespace": _Namespace, "raise_exception": _raise_exception,
            "strftime_now": _strftime_now
        }  # fmt: skip
        self.globals.update(functions)

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        charges = _Charges()
        tree.body = [charges.visit(node) for node in tree.body]
        self.block_units = charges.units
        tree.set_environment(self)
        return tree

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS):
            if operator == "**":
                raise jinja2.TemplateError("the operator ** is not allowed in a chat template")
        elif isinstance(context, WorkContext):
            _charge_operator(context.budget, operator, left, right)
        result = self.binop_table[operator](left, right)
        if isinstance(result, int):
            check_int(result)
        return result

    def call(__self, __context: jinja2.runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if not isinstance(__context, WorkContext):
            raise TypeError("a chat template is rendered without a budget")
        args = _charge_call(__context.budget, __obj, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, _COPIED):
            __context.budget.copy(len(result))
        elif isinstance(result, int):
            check_int(result)
        return result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in _FORBIDDEN_METHODS and isinstance(obj, (str, bytes, int, Mapping)):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        function = super().wrap_str_format(value)
        return None if function is None else TextFormat(value.__self__, function)


class _Namespace(jinja2.utils.Namespace):
    """A namespace whose text does not contain its values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(_make_dict(*args, **kwargs))

    def __repr__(self) -> str:
        return "<Namespace>"


class _Generation(jinja2.ext.Extension):
    """The tag `{% generation %}…{% endgeneration %}`, which marks the assistant's text for training. It renders its
    content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    pairs = [pair for arg in args for pair in (arg.items() if isinstance(arg, Mapping) else arg)]
    made: dict[Any, Any] = {}
    for key, value in pairs:
        made[check_key(key)] = value
    return made | kwargs


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now(UTC).strftime(form[:256])


@jinja2.pass_context
def _finalize(context: WorkContext, value: Any) -> Any:
    if isinstance(value, str):
        context.budget.copy(len(value))
    elif not isinstance(value, jinja2.Undefined):
        context.budget.process(value)
    return value


def _charge_operator(budget: WorkBudget, operator: str, left: Any, right: Any) -> None:
    if operator == "+" and isinstance(left, _COPIED) and isinstance(right, _COPIED):
        budget.copy(len(left) + len(right))
    elif operator == "%" and isinstance(left, str):
        charge_percent(budget, left, right if isinstance(right, tuple | Mapping) else (right,))
    elif operator == "*":
        values, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(values, _COPIED) and isinstance(times, int):
            budget.copy(len(values) * times)
    elif isinstance(left, bytes | MappingView) or isinstance(right, bytes | MappingView):
        raise jinja2.TemplateError(f"the operator {operator} is not allowed here in a chat template")


def _charge_call(budget: WorkBudget, called: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Charge a call and return its arguments, with a list for an iterator, which can be read only once."""
    budget.charge(CALL_UNITS + len(args) + len(kwargs))
    # Jinja adds arguments of its own, such as _loop_vars.
    named = {name: value for name, value in kwargs.items() if not name.startswith("_")} if kwargs else kwargs
    if isinstance(called, _METHODS):
        if any(isinstance(arg, Iterator) for arg in args):
            args = tuple(list(budget.iterate(arg)) if isinstance(arg, Iterator) else arg for arg in args)
        budget.call_method(called, *args, **named)
    elif isinstance(called, jinja2.runtime.LoopContext) or called is _make_dict or called is _Namespace:
        for arg in args:
            budget.iterate(arg)
    elif isinstance(called, TextFormat):
        called.charge(budget, args, named)
    elif isinstance(called, jinja2.runtime.Macro):
        budget.charge(MACRO_UNITS)
    else:
        budget.process(*args, *named.values())
    return args
