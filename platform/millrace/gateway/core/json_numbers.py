"""JSON of requests, whose integers may have more than 64 bits. The encoders of the platform have none for those."""

from __future__ import annotations

from typing import Any

import msgspec

_DIGITS = bytes.maketrans(b"0123456789", b"0" * 10)
_LONG_NUMBER = b"0" * 19  # shorter ones have at most 63 bits


def decode_json(text: bytes | str) -> Any:
    """Return the decoded text, with floats in place of integers that do not fit into 64 bits.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is not valid JSON.
    """
    value = msgspec.json.decode(text)
    encoded = text.encode() if isinstance(text, str) else text
    return _replace_integers(value) if _LONG_NUMBER in encoded.translate(_DIGITS) else value


def _replace_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _replace_integers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_replace_integers(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return _to_float(value)
    return value


def _to_float(value: int) -> float:
    """Return the nearest float; of integers beyond its range the largest one."""
    try:
        return float(value)
    except OverflowError:
        return 1.7976931348623157e308 if value > 0 else -1.7976931348623157e308
