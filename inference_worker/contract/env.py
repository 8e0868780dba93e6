"""Typed settings from environment variables.

A settings class is a frozen dataclass whose fields are declared with `env()`. The field `log_level` is read from the
variable MILLRACE_LOG_LEVEL. `load()` reads all fields and reports all problems together. The variable NAME_FILE can
name a file that contains the value of NAME, for secrets. docs/explanation/adr/0001-own-settings.md explains why this is
not a library.
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
PREFIX = "MILLRACE_"
# Of clients (millrace.cli.profiles), often set in the platform's own shell.
CLIENT_VARIABLES = frozenset({"MILLRACE_API_KEY", "MILLRACE_PROFILE", "MILLRACE_URL"})


class SettingsError(Exception):
    """An error for one or more missing or wrong settings. The message names each one and its valid values."""


@dataclasses.dataclass(frozen=True)
class EnvVar:
    """The declaration of a setting: its variable, its default as environment text, and its help."""

    name: str
    parse: Callable[[str], Any]
    default: str | None  # None: required
    help: str
    secret: bool = False


def env(parse: Callable[[str], T], default: str | None, help: str, *, secret: bool = False) -> T:
    """Declare a field of a settings class. If `default` is None, the setting is required."""
    return cast(T, dataclasses.field(metadata={_META: (parse, default, help, secret)}))


def variables(*classes: type[Any]) -> list[EnvVar]:
    """Return every variable of the settings classes once, in order of declaration."""
    names = {field.name: field.metadata[_META] for cls in classes for field in dataclasses.fields(cls)}
    return [EnvVar(f"{PREFIX}{name.upper()}", *declared) for name, declared in names.items()]


def load(cls: type[T], environ: Mapping[str, str] | None = None) -> T:
    """Read the settings class `cls`.

    Raises:
        SettingsError: settings are missing or invalid; the message names all of them.
    """
    return cls(**read_all(os.environ if environ is None else environ, cls))


def read_all(environ: Mapping[str, str], *classes: type[Any]) -> dict[str, Any]:
    """Return the values of all fields of the settings classes.

    Raises:
        SettingsError: settings are missing or invalid; the message names all of them.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for var in variables(*classes):
        try:
            values[var.name.removeprefix(PREFIX).lower()] = read(var, environ)
        except (ValueError, OSError) as exc:
            problems.append(f"{var.name}: {exc}")
    if problems:
        raise SettingsError("invalid settings:\n  " + "\n  ".join(problems))
    return values


def read_one(environ: Mapping[str, str], cls: type[Any], field: str) -> Any:
    """Return the value of one field. The other settings may be missing.

    Raises:
        ValueError: the value is wrong; the message names the variable.
    """
    var = next(var for var in variables(cls) if var.name == f"{PREFIX}{field.upper()}")
    try:
        return read(var, environ)
    except ValueError as exc:
        raise ValueError(f"{var.name}: {exc}") from exc


def unknown_names(environ: Mapping[str, str], *classes: type[Any]) -> list[str]:
    """Return the set MILLRACE_ variables that no settings class reads. They are probably misspelled."""
    known = {name for var in variables(*classes) for name in (var.name, f"{var.name}_FILE")} | CLIENT_VARIABLES
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known)


def read(var: EnvVar, environ: Mapping[str, str]) -> Any:
    """Return the value of one variable.

    Raises:
        ValueError: the variable is missing or its value is wrong.
    """
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
        value = "its value" if var.secret else repr(text)
        raise ValueError(f"{value} is not valid: {exc}") from exc


# Parsers of values. They raise ValueError with the expected format.


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
            raise ValueError("want an integer") from None
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


def secret(text: str) -> str:
    """Check that a secret is long enough to be unguessable."""
    if len(text) < 32:
        raise ValueError("must have at least 32 characters")
    return text


def size(text: str) -> int:
    """Return a number of bytes from a number with an optional KiB, MiB or GiB."""
    for suffix, factor in (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30), ("", 1)):
        if text.endswith(suffix):
            try:
                return int(text.removesuffix(suffix)) * factor
            except ValueError:
                break
    raise ValueError("want a size such as 512MiB or 2GiB")


def size_or_share(text: str) -> int | float:
    """Return a number of bytes as `size` does, or a share from a number with a decimal point."""
    if "." not in text:
        return size(text)
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        raise ValueError("want a size such as 2GiB, or a share above 0 and below 1 such as 0.9")
    return share


def optional(parse: Callable[[str], T], empty: T) -> Callable[[str], T]:
    """Return a parser for which an empty text means `empty`."""
    return lambda text: parse(text) if text else empty


def path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def words(text: str) -> tuple[str, ...]:
    return tuple(word for word in (part.strip() for part in text.split(",")) if word)
