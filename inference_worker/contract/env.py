"""Typed settings from the environment, failing loudly and by name.

A settings class is a frozen dataclass whose fields are made with `env()`; `load()` reads them all and reports every
fault at once. A setting NAME can also be given as NAME_FILE, a path whose content is the value (for secrets).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

T = TypeVar("T")
S = TypeVar("S", bound=str)
_META = "millrace.env"


class SettingsError(Exception):
    """One or more settings are missing or wrong; the message names each and says what it takes."""


@dataclasses.dataclass(frozen=True)
class EnvVar:
    """How one setting is read: its variable, its default as it would be written in the environment, and its help."""

    name: str
    parse: Callable[[str], Any]
    default: str | None  # None: required
    help: str
    secret: bool = False


def env(name: str, parse: Callable[[str], T], *, default: str | None, help: str, secret: bool = False) -> T:
    """Declare a field of a settings class as read from the variable `name`. Without a default it is required."""
    return cast(T, dataclasses.field(metadata={_META: EnvVar(name, parse, default, help, secret)}))


def variables(*classes: type[Any]) -> list[EnvVar]:
    """Every variable the settings classes read, in order of declaration, each once."""
    found = {f.metadata[_META].name: f.metadata[_META] for cls in classes for f in dataclasses.fields(cls)}
    return list(found.values())


def load(cls: type[T], environ: Mapping[str, str] | None = None) -> T:
    """Read the settings class `cls`.

    Raises:
        SettingsError: naming every variable that is missing or wrong.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    faults: list[str] = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        var: EnvVar = field.metadata[_META]
        try:
            values[field.name] = read(var, environ)
        except (ValueError, OSError) as exc:
            faults.append(f"{var.name}: {exc}")
    if faults:
        raise SettingsError("wrong settings:\n  " + "\n  ".join(faults))
    return cls(**values)


def unknown_names(environ: Mapping[str, str], *classes: type[Any]) -> list[str]:
    """MILLRACE_ variables that no settings class reads: most likely typing errors."""
    known = {name for var in variables(*classes) for name in (var.name, f"{var.name}_FILE")}
    return sorted(name for name in environ if name.startswith("MILLRACE_") and name not in known)


def read(var: EnvVar, environ: Mapping[str, str]) -> Any:
    """Return the value of one variable; ValueError says what is wrong with it."""
    text = environ.get(var.name)
    if text is None and (path := environ.get(f"{var.name}_FILE")):
        text = Path(path).read_text(encoding="utf-8").strip()
    if text is None:
        text = var.default
    if text is None:
        raise ValueError(f"is required: {var.help}")
    try:
        return var.parse(text)
    except ValueError as exc:
        shown = "its value" if var.secret else repr(text)
        raise ValueError(f"{shown} is not valid: {exc}") from exc


# Parsers: text in, value out, ValueError with what is wanted.


def boolean(text: str) -> bool:
    try:
        return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
    except KeyError:
        raise ValueError("want true or false") from None


def integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("want a whole number") from None
        if not low <= value <= high:
            raise ValueError(f"want a number from {low} to {high}")
        return value

    return parse


def choice(*options: S) -> Callable[[str], S]:
    def parse(text: str) -> S:
        for option in options:
            if option == text:
                return option
        raise ValueError(f"want one of {', '.join(options)}")

    return parse


def url(*schemes: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.split("://", 1)[0] not in schemes or "://" not in text:
            raise ValueError(f"want a URL that starts with {' or '.join(s + '://' for s in schemes)}")
        return text

    return parse


def size(text: str) -> int:
    """Bytes, from a number with an optional KiB, MiB or GiB."""
    for suffix, factor in (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("", 1)):
        if text.endswith(suffix):
            try:
                return int(text.removesuffix(suffix)) * factor
            except ValueError:
                break
    raise ValueError("want a size such as 512MiB or 2GiB")


def path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def words(text: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in text.split(",")) if word)
