"""Filters and tests of chat templates, each charged to the budget of work before it runs."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.filters
import jinja2.runtime
import jinja2.utils

from inference_worker.checkpoints.template_formats import charge_percent
from inference_worker.checkpoints.template_work import (
    CALL_UNITS,
    CHARACTERS_COPIED,
    MAX_DEPTH,
    WorkBudget,
    WorkContext,
    check_int,
    check_key,
    count_attributes,
)

MAX_PRECISION = 30  # digits to which a number is rounded
_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "lteq": operator.le, "gt": operator.gt,
    "gteq": operator.ge, "in": lambda left, right: left in right, "notin": lambda left, right: left not in right,
}  # fmt: skip
# Filters that no template needs, and whose cost is hard to bound.
_REMOVED_FILTERS = (
    "batch", "filesizeformat", "forceescape", "pprint", "slice", "striptags", "urlencode", "urlize", "wordwrap",
    "xmlattr",
)  # fmt: skip
_CONSTANT_FILTERS = frozenset({"attr", "count", "d", "default", "first", "items", "last", "length", "random"})
_CONSTANT_TESTS = frozenset(
    {"boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable", "mapping", "none", "number"}
    | {"sameas", "sequence", "string", "true", "undefined"}
)
_NUMBER_TESTS = frozenset({"divisibleby", "even", "odd"})


def charge_filters(filters: dict[str, Any]) -> None:
    """Replace Jinja's filters by filters with charges, and add the internal filters."""
    for name in _REMOVED_FILTERS:
        del filters[name]
    for name, function in list(filters.items()):
        if name not in _CONSTANT_FILTERS:
            filters[name] = _OWN_FILTERS.get(name) or _charged_filter(name, function)
    filters.update(INTERNAL_FILTERS)


def charge_tests(tests: dict[str, Any]) -> None:
    """Replace Jinja's tests by tests with charges."""
    for name, function in list(tests.items()):
        if name not in _CONSTANT_TESTS:
            tests[name] = _charged_test(function, is_of_numbers=name in _NUMBER_TESTS)


def _charged_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter with a charge for its values and its result."""
    passes = jinja2.utils._PassArg.from_obj(function)
    charge = _CHARGES.get(name, _charge_process)

    @jinja2.pass_context
    def charge_and_call(context: WorkContext, *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        args = charge(budget, args, kwargs)
        units = _item_units(args, kwargs)
        if passes is jinja2.utils._PassArg.context:
            args = (context, *args)
        elif passes is jinja2.utils._PassArg.eval_context:
            args = (context.eval_ctx, *args)
        elif passes is jinja2.utils._PassArg.environment:
            args = (context.environment, *args)
        result = function(*args, **kwargs)
        if isinstance(result, int):
            check_int(result)
        elif isinstance(result, Iterator):
            return budget.count_each(result, units)
        return result

    return charge_and_call


def _item_units(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the units of an item in a filter that looks up its attributes."""
    if len(args) == 1 and not kwargs:
        return CALL_UNITS
    return 2 * CALL_UNITS * (1 + count_attributes((*args[1:], *kwargs.values())))


def _charge_process(budget: WorkBudget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Charge the values of a filter and return its arguments, with a list for an iterator, which can be read only
    once."""
    if isinstance(args[0], Iterator):
        args = (list(budget.iterate(args[0])), *args[1:])
    budget.process(*args, *kwargs.values())
    return args


def _charge_lazy(budget: WorkBudget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Charge a filter whose items are charged when they are read."""
    budget.measure(*args[1:], *kwargs.values())
    budget.iterate(args[0])
    return args


def _charge_list(budget: WorkBudget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    budget.iterate(args[0])
    return args


def _charge_copy(budget: WorkBudget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    if not isinstance(args[0], str):
        return _charge_process(budget, args, kwargs)
    characters = budget.measure(*args[1:], *kwargs.values())[1] if len(args) > 1 or kwargs else 0
    budget.search(args[0], characters, is_linear=False)
    return args


def _charge_sort(budget: WorkBudget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    args = _charge_process(budget, args, kwargs)
    count, characters = budget.measure(args[0])
    length = len(args[0]) if hasattr(args[0], "__len__") else 1
    units = (count + characters // CHARACTERS_COPIED) * length.bit_length()
    budget.charge(units + length * _item_units(args, kwargs))
    return args


def _charge_unique(budget: WorkBudget, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    args = _charge_sort(budget, args, kwargs)
    if hasattr(args[0], "__len__"):
        budget.charge(len(args[0]) ** 2 // 16)  # the hashes of tuples can be made equal
    return args


_CHARGES: Mapping[str, Callable[[WorkBudget, tuple[Any, ...], Mapping[str, Any]], tuple[Any, ...]]] = {
    **dict.fromkeys(("map", "reject", "rejectattr", "select", "selectattr"), _charge_lazy),
    **dict.fromkeys(("list", "reverse"), _charge_list),
    **dict.fromkeys(("dictsort", "groupby", "max", "min", "sort"), _charge_sort),
    **dict.fromkeys(("string", "trim"), _charge_copy),
    "unique": _charge_unique,
}


def _charged_test(function: Callable[..., Any], *, is_of_numbers: bool) -> Callable[..., Any]:
    """Return the test with a charge for its values."""
    passes_environment = jinja2.utils._PassArg.from_obj(function) is jinja2.utils._PassArg.environment

    @jinja2.pass_context
    def charge_and_call(context: WorkContext, *args: Any) -> Any:
        if is_of_numbers and not all(isinstance(value, int | float) for value in args):
            raise jinja2.TemplateError("a test of numbers in the chat template has another value")
        context.budget.process(*args)
        return function(context.environment, *args) if passes_environment else function(*args)

    return charge_and_call


def _to_text(budget: WorkBudget, value: Any) -> str:
    """Return the text of a value that is one, or becomes one, within the budget."""
    if isinstance(value, str):
        return value
    budget.process(value)
    return str(value)


@jinja2.pass_context
def _format_filter(context: WorkContext, value: str, *args: Any, **kwargs: Any) -> str:
    charge_percent(context.budget, value, kwargs or args)
    return str(jinja2.filters.do_format(value, *args, **kwargs))


@jinja2.pass_context
def _center_filter(context: WorkContext, value: str, width: int = 80) -> str:
    context.budget.process(value)
    context.budget.copy(width)
    return jinja2.filters.do_center(value, width)


@jinja2.pass_context
def _indent_filter(context: WorkContext, s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    context.budget.process(s, width)
    context.budget.copy(len(s) + (len(s.splitlines()) + 1) * (width if isinstance(width, int) else len(width)))
    return jinja2.filters.do_indent(s, width, first, blank)


@jinja2.pass_context
def _join_filter(context: WorkContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    budget = context.budget
    values = list(budget.iterate(value))
    if check_key(attribute) is not None:
        budget.charge(CALL_UNITS * len(values) * (1 + count_attributes((attribute,))))
        get = jinja2.filters.make_attrgetter(context.environment, attribute)
        values = [get(item) for item in values]
    budget.join(_to_text(budget, d), values)
    return str(jinja2.filters.do_join(context.eval_ctx, values, d))


@jinja2.pass_context
def _replace_filter(context: WorkContext, s: str, old: str, new: str, count: int | None = None) -> str:
    budget = context.budget
    budget.replace(*(_to_text(budget, value) for value in (s, old, new)))
    return jinja2.filters.do_replace(context.eval_ctx, s, old, new, count)


@jinja2.pass_context
def _round_filter(context: WorkContext, value: float, precision: int = 0, method: Any = "common") -> float:
    if isinstance(value, int):
        check_int(value)
    if not -MAX_PRECISION <= precision <= MAX_PRECISION:
        raise jinja2.TemplateError(f"round: the precision must be at most {MAX_PRECISION} in a chat template")
    return jinja2.filters.do_round(value, precision, method)


@jinja2.pass_context
def _sum_filter(
    context: WorkContext, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    budget, environment = context.budget, context.environment
    get: Callable[[Any], Any] = _identity
    if check_key(attribute) is not None:
        get = jinja2.filters.make_attrgetter(environment, attribute)
    units = CALL_UNITS * count_attributes((attribute,)) + 2
    total = start
    for item in budget.count_each(iter(budget.iterate(iterable)), units):
        total = total + _check_number(get(item))
    return _check_number(total)


def _identity(value: Any) -> Any:
    return value


def _check_number(value: Any) -> Any:
    if not isinstance(value, int | float):
        raise jinja2.TemplateError("sum: values must be numbers in a chat template")
    if isinstance(value, int):
        check_int(value)
    return value


@jinja2.pass_context
def _to_json(
    context: WorkContext,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML; a prompt must not be.
    if isinstance(indent, str) or (indent or 0) > 16:
        raise jinja2.TemplateError("tojson: indent is too large")
    budget = context.budget
    count, _ = budget.measure(value)
    budget.process(value, separators)
    budget.copy(count * ((indent or 0) * MAX_DEPTH + sum(map(len, separators or ()))))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@jinja2.pass_context
def _charge(context: WorkContext, value: Any, units: int) -> Any:
    context.budget.charge(units)
    return value


@jinja2.pass_context
def _iterate(context: WorkContext, values: Any) -> Any:
    if isinstance(values, jinja2.runtime.LoopContext):
        raise jinja2.TemplateError("the chat template uses a loop as a value")
    return values


@jinja2.pass_context
def _operand(context: WorkContext, value: Any) -> Any:
    context.budget.process(value)
    return value


def _charge_comparison(budget: WorkBudget, operator: str, left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        if operator.endswith("in"):
            budget.search(right, len(left))
        else:
            budget.copy(min(len(left), len(right)))
    elif operator.endswith("in") and isinstance(right, Mapping):
        budget.copy(len(left)) if isinstance(left, str) else budget.process(left)
    elif operator.endswith("in") and isinstance(right, list | tuple):
        budget.find(right, left)
    elif not (isinstance(left, int | float) and isinstance(right, int | float)):
        budget.process(left, right)


@jinja2.pass_context
def _compare(context: WorkContext, left: Any, operator: str, right: Any) -> bool:
    _charge_comparison(context.budget, operator, left, right)
    return _COMPARISONS[operator](left, right)


@jinja2.pass_context
def _key(context: WorkContext, key: Any) -> Any:
    if isinstance(key, str):
        context.budget.copy(len(key))
    return check_key(key)


@jinja2.pass_context
def _slice(context: WorkContext, part: Any) -> Any:
    if isinstance(part, str | list | tuple):
        context.budget.copy(len(part))
    return part


@jinja2.pass_context
def _concatenate(context: WorkContext, values: list[Any]) -> str:
    budget = context.budget
    for value in values:
        budget.copy(len(value)) if isinstance(value, str) else budget.process(value)
    return "".join(map(str, values))


_OWN_FILTERS: Mapping[str, Callable[..., Any]] = {
    "center": _center_filter,
    "format": _format_filter,
    "indent": _indent_filter,
    "join": _join_filter,
    "replace": _replace_filter,
    "round": _round_filter,
    "sum": _sum_filter,
    "tojson": _to_json,
}
INTERNAL_FILTERS: Mapping[str, Callable[..., Any]] = {
    "(charge)": _charge,
    "(compare)": _compare,
    "(concatenate)": _concatenate,
    "(iterate)": _iterate,
    "(key)": _key,
    "(operand)": _operand,
    "(slice)": _slice,
}
