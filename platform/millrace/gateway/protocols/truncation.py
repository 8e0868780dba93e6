"""The parameters of encoder requests by which inputs are truncated, in the words of several servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from inference_worker.contract.request import document
from millrace.gateway.core.errors import invalid
from millrace.gateway.core.types import MODEL_LENGTH, InputTruncation
from millrace.gateway.protocols.openai.parameters import check_truncation

# Values of `truncate`: whether inputs are truncated, and whether their end stays.
_WORDS: Mapping[str, tuple[bool, bool | None]] = {"NONE": (False, None), "END": (True, False), "START": (True, True)}
_SIDES = {"right": False, "left": True}  # the side that is dropped, and whether the input's end stays
Side = Annotated[str, document(enum=[*_SIDES])]


class TruncationFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`truncate` of text-embeddings-inference and Cohere, `truncation` of Voyage, and the names of vLLM."""

    truncate: bool | Annotated[str, document(enum=[*_WORDS])] | None = None
    truncation: bool | None = None
    truncate_prompt_tokens: Annotated[int, document(minimum=MODEL_LENGTH)] | None = None
    truncation_side: Side | None = None
    truncation_direction: Side | None = None


TRUNCATION_NAMES = tuple(field.name for field in msgspec.structs.fields(TruncationFields))


def read_truncation(body: TruncationFields) -> InputTruncation:
    """Return how the inputs of a request are truncated.

    Raises:
        ApiError: 400 that names the parameter.
    """
    tokens = body.truncate_prompt_tokens
    check_truncation(tokens)
    switch, keeps_end = body.truncate, None
    if isinstance(switch, str):
        if switch.upper() not in _WORDS:
            raise invalid("truncate", f"truncate must be true, false or one of {', '.join(_WORDS)}.")
        switch, keeps_end = _WORDS[switch.upper()]
    switches = {
        "truncate_prompt_tokens": None if tokens is None else True,
        "truncate": switch,
        "truncation": body.truncation,
    }
    sides = {
        "truncate": keeps_end,
        "truncation_side": _read_side("truncation_side", body.truncation_side),
        "truncation_direction": _read_side("truncation_direction", body.truncation_direction),
    }
    return InputTruncation(
        is_allowed=_require_agreement(switches),
        max_tokens=None if tokens == MODEL_LENGTH else tokens,
        keeps_end=bool(_require_agreement(sides)),
    )


def _read_side(name: str, value: str | None) -> bool | None:
    if value is not None and value.lower() not in _SIDES:
        raise invalid(name, f"{name} must be {' or '.join(_SIDES)}.")
    return None if value is None else _SIDES[value.lower()]


def _require_agreement(values: Mapping[str, bool | None]) -> bool | None:
    """Return the common value of the parameters that are given; None if none is.

    Raises:
        ApiError: 400, they contradict each other.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if len(set(given.values())) > 1:
        *_, name = given
        raise invalid(name, f"{' and '.join(given)} contradict each other. Send one of them.")
    return next(iter(given.values()), None)
