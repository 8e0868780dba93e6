"""A routing policy's body: which deployments a tenant's logical model name stands for, in order. Free of Django."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a logical model name stands for: the first model that can serve."""

    models: tuple[str, ...]


def parse(body: Mapping[str, Any]) -> Policy:
    """The policy a JSON body describes.

    Raises:
        ValueError: it describes none; the message names the place.
    """
    try:
        parsed = msgspec.convert(body, Policy)
    except msgspec.ValidationError as fault:
        raise ValueError(str(fault)) from fault
    if not parsed.models:
        raise ValueError("want at least one model - at `$.models`")
    return parsed
