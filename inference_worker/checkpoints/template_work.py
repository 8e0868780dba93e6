"""The work of a chat template: one budget of units, and the units that each operation costs.

A unit is about 100 ns. Each operation is charged before it runs, by the size of its operands and of its result.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, MappingView, Sized, ValuesView
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
import jinja2.runtime

BASE_UNITS = 150_000  # units of a rendering, whatever its input
UNITS_PER_VALUE = 4_000  # more for each value in the input: messages, their fields, tools, variables
UNITS_PER_CHARACTER = 40  # more for each character in the input
MAX_UNITS = 30_000_000
CALL_UNITS = 10  # units of a call, and of an item in a filter that handles items one by one
MAX_INT = 1 << 1024
MAX_DEPTH = 200  # levels of values in values
CHARACTERS_COPIED = 32  # a unit's worth, at least
CHARACTERS_PROCESSED = 4
MAX_NEEDLE = 128  # a search in a text costs as much as this many comparisons a character, whatever it searches

TOO_MUCH_WORK = (
    "The model's chat template needs too much work for a prompt of this size. Shorten the prompt, or report this to the"
    " operator of the model."
)

# Methods of texts by their cost. Others process each character.
_PREFIX_METHODS = frozenset({"startswith", "endswith"})
_SEARCH_METHODS = frozenset({"count", "find", "index", "partition", "removeprefix", "removesuffix", "replace", "split"})
_SLOW_SEARCH_METHODS = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})


_SEQUENCES = (list, tuple)
_CONTAINERS = (list, tuple, KeysView, ValuesView, ItemsView, range)
_MAPPINGS = (dict, Mapping)  # the first is found faster
_KEYED = (list, tuple, dict, Mapping, MappingView)


class TemplateWorkError(jinja2.TemplateError):
    """Raised if a template needs more work than its budget."""


class WorkBudget:
    """The remaining work of one rendering."""

    __slots__ = ("units",)

    def __init__(self, units: int) -> None:
        self.units = units

    @classmethod
    def for_input(cls, *values: Any) -> WorkBudget:
        """Return the budget of a rendering of these values: a constant, and a part in proportion to their size.

        Raises:
            jinja2.TemplateError: an integer in them is too large, or they are nested too deeply.
        """
        count, characters = cls(MAX_UNITS).measure(*values)
        return cls(min(MAX_UNITS, BASE_UNITS + UNITS_PER_VALUE * count + UNITS_PER_CHARACTER * characters))

    def charge(self, units: int) -> None:
        """Subtract the units.

        Raises:
            TemplateWorkError: fewer units remain.
        """
        self.units -= units
        if self.units < 0:
            raise TemplateWorkError(TOO_MUCH_WORK)

    def copy(self, characters: int) -> None:
        """Charge a text or a list of this length that is copied or compared."""
        if characters >= CHARACTERS_COPIED:
            self.charge(characters // CHARACTERS_COPIED)

    def process(self, *values: Any) -> None:
        """Charge values whose text is processed character by character."""
        count, characters = self.measure(*values)
        self.charge(count + characters // CHARACTERS_PROCESSED)

    def measure(self, *values: Any) -> tuple[int, int]:
        """Return the number of values and of characters in `values`, and charge the count.

        A value counts as often as it occurs. A list can contain another one several times, so its text can be
        exponentially larger than its memory.
        """
        count = characters = 0
        level: list[Any] = list(values)
        for _ in range(MAX_DEPTH):
            count += len(level)
            inner: list[Any] = []
            for value in level:
                if isinstance(value, str):
                    characters += len(value)
                elif isinstance(value, int):
                    check_int(value)
                elif isinstance(value, _MAPPINGS):
                    self.charge(4 * len(value))
                    inner += value
                    inner += value.values()
                elif isinstance(value, _CONTAINERS):
                    self.charge(2 * len(value))
                    inner += value
                elif isinstance(value, jinja2.runtime.LoopContext):
                    raise jinja2.TemplateError("the chat template uses a loop as a value")
            if not inner:
                return count, characters
            level = inner
        raise jinja2.TemplateError(f"values are nested more than {MAX_DEPTH} deep")

    def iterate(self, values: Any) -> Any:
        """Return `values` and charge the list of them, if their number is known. Iterators charge each value."""
        if isinstance(values, jinja2.runtime.LoopContext):
            raise jinja2.TemplateError("the chat template uses a loop as a value")
        if isinstance(values, Sized):
            self.charge(len(values) // 2)
        return values

    def count_each(self, values: Iterator[Any], units: int) -> Iterator[Any]:
        """Yield the values and charge `units` for each."""
        for value in values:
            self.charge(units)
            yield value

    def search(self, text: str, needle: int, *, is_linear: bool = True) -> None:
        """Charge a search in a text for `needle` characters."""
        self.copy(len(text) * (1 + (min(needle, MAX_NEEDLE) if is_linear else needle) // 8))

    def find(self, values: list[Any] | tuple[Any, ...], value: Any) -> None:
        """Charge a comparison of a value with each of `values`. None costs more than the value's size."""
        count, characters = self.measure(value)
        self.charge(len(values) * (count + characters // CHARACTERS_COPIED) // 4)

    def replace(self, text: str, old: str = "", new: str = "") -> None:
        """Charge a replacement in a text, and its result."""
        self.search(text, len(old))
        self.copy(len(text) + (text.count(old) + 1) * len(new))

    def join(self, separator: str, values: list[Any]) -> None:
        """Charge the text of values with a separator."""
        count, characters = self.measure(*values)
        self.charge(count)
        if all(isinstance(value, str) for value in values):
            self.copy(characters + count * len(separator))
        else:
            self.charge((characters + count * len(separator)) // CHARACTERS_PROCESSED)

    def call_method(self, method: BuiltinMethodType | MethodType, *args: Any, **kwargs: Any) -> None:
        """Charge a call of a value's method."""
        owner, name = method.__self__, method.__name__
        if isinstance(owner, str):
            self._call_text_method(owner, name, *args, **kwargs)
        elif isinstance(owner, _MAPPINGS):
            self.process(*args, *kwargs.values())
            self.copy(len(owner) if name == "copy" else 0)
        elif isinstance(owner, _SEQUENCES) and args:  # index and count
            for arg in args:
                self.find(owner, arg)
        else:
            values = (owner,) if isinstance(owner, _CONTAINERS) else ()
            self.process(*values, *args, *kwargs.values())

    def _call_text_method(self, text: str, name: str, *args: Any, **kwargs: Any) -> None:
        if name == "join":
            self.join(text, list(args[0]) if args else [])
            return
        count, characters = self.measure(*args, *kwargs.values())
        if name in _PREFIX_METHODS:
            self.charge(count)
            self.copy(characters)
        elif name in _SEARCH_METHODS or name in _SLOW_SEARCH_METHODS:
            self.search(text, characters, is_linear=name in _SEARCH_METHODS)
            if name == "replace":
                self.replace(text, *args[:2])
            elif name in ("split", "rsplit"):
                separator = args[0] if args else kwargs.get("sep")
                self.charge(text.count(separator) if isinstance(separator, str) else len(text) // CHARACTERS_PROCESSED)
        else:
            self.charge((len(text) + characters) // CHARACTERS_PROCESSED)


class WorkContext(jinja2.runtime.Context):
    """The variables of a rendering, with its budget."""

    budget: WorkBudget


def check_int(value: int) -> None:
    """Check that an integer is small enough for constant-time arithmetic."""
    if not -MAX_INT < value < MAX_INT:
        raise jinja2.TemplateError("an integer in the chat template is too large")


def check_key(key: Any) -> Any:
    """Return the key of a mapping or the index of a list. Those that contain values are refused.

    Their hash, and their text in an error, can cost exponentially more than their memory. Hashes of tuples can be made
    equal.
    """
    if not isinstance(key, (str, int)) and isinstance(key, _KEYED):
        raise jinja2.TemplateError("a key in the chat template is a list, tuple or mapping")
    return key


def count_attributes(args: Iterable[Any]) -> int:
    """Return the number of attributes that a filter's arguments name: `a.b` or `a,b`."""
    return sum(1 + arg.count(".") + arg.count(",") for arg in args if isinstance(arg, str))
