"""Errors of routing policies, each with the path of the value in the policy. Does not import Django."""

from __future__ import annotations

import msgspec

from inference_worker.contract.texts import Text


def error_at(place: str, error: str) -> ValueError:
    """Return the error of the value at `place`, such as `$.rules[0].when`. Its message ends with the path."""
    return ValueError(Text("%(error)s - at `%(place)s`", error=error, place=place))


def error_of_conversion(exc: msgspec.ValidationError) -> ValueError:
    """Return the error of a body that msgspec cannot convert."""
    error, _, place = str(exc).partition(" - at `")
    return error_at(place.removesuffix("`"), _read(error)) if place else ValueError(_read(error))


def _read(error: str) -> str:
    """Return a message of msgspec as a text that the console translates, or unchanged if it is not known."""
    match error.split("`"):
        case ["Object missing required field ", name, ""]:
            return Text("Object missing required field `%(name)s`", name=name)
        case ["Object contains unknown field ", name, ""]:
            return Text("Object contains unknown field `%(name)s`", name=name)
        case ["Expected ", expected, ", got ", found, ""]:
            return Text("Expected `%(expected)s`, got `%(got)s`", expected=expected, got=found)
        case ["Expected ", expected, condition] if condition.startswith(" of length "):
            condition = condition.removeprefix(" of length ")
            return Text("Expected `%(expected)s` of length %(condition)s", expected=expected, condition=condition)
        case ["Expected ", expected, ""]:
            return Text("Expected `%(expected)s`", expected=expected)
        case ["Expected ", expected, condition]:
            return Text("Expected `%(expected)s` %(condition)s", expected=expected, condition=condition.strip())
    if error.startswith("Invalid enum value "):
        return Text("Invalid enum value %(value)s", value=error.removeprefix("Invalid enum value "))
    return error
