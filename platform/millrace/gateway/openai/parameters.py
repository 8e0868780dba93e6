"""Reading a JSON body strictly: nothing is accepted and ignored.

A parameter is supported (a field of the endpoint's struct), or documented by OpenAI and accepted only at the value at
which it does nothing (`NO_OP`), or refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec

from inference_worker.engine.request import SamplingParams
from millrace.gateway.errors import ApiError, invalid

T = TypeVar("T", bound=msgspec.Struct)

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 64

# Values at which a documented parameter that is not supported does nothing. null is one for each.
NO_OP: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "priority": (0,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),  # without tools it does nothing either way
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_cache_options": ({},),
    "guided_regex": (),
    "guided_grammar": (),
}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What chat completions and completions both take."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None


def read_body(body: bytes, type_: type[T]) -> T:
    """Decode and check a request's JSON.

    Raises:
        ApiError: 400 that names the parameter.
    """
    try:
        fields = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise ApiError("invalid_json", f"The request body is not valid JSON: {fault}") from None
    if not isinstance(fields, dict):
        raise ApiError("invalid_json", "The request body must be a JSON object.")
    known = _names(type_)
    wanted = {name: value for name, value in fields.items() if value is not None}
    for name in [name for name in wanted if name not in known]:
        _require_no_op(name, wanted.pop(name))
    try:
        return msgspec.convert(wanted, type_)
    except msgspec.ValidationError as fault:
        raise _explain(fault) from None


@cache
def _names(type_: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(type_))


def sampling_params(body: Common) -> SamplingParams:
    """Check the ranges of what chooses and ends the tokens.

    Raises:
        ApiError: 400 that names the parameter.
    """
    _within("temperature", body.temperature, 0, 2)
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise invalid("top_p", f"{body.top_p} is out of range: top_p must be above 0 and at most 1.")
    _within("top_k", body.top_k, -1, 1_000_000)
    _within("seed", body.seed, -(2**63), 2**63 - 1)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"At most {MAX_STOPS} stop strings are allowed, not {len(stops)}.")
    if any(not stop or len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise invalid("stop", f"A stop string must have 1 to {MAX_STOP_CHARACTERS} characters.")
    stop_ids = body.stop_token_ids or []
    if len(stop_ids) > MAX_STOP_TOKEN_IDS or any(not 0 <= i < 2**31 for i in stop_ids):
        raise invalid("stop_token_ids", f"At most {MAX_STOP_TOKEN_IDS} token ids from 0 on are allowed.")
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        seed=None if body.seed is None else body.seed & (2**63 - 1),
        stop=tuple(stops),
        stop_token_ids=tuple(stop_ids),
        ignore_eos=bool(body.ignore_eos),
    )


def check_common(body: Common) -> None:
    """Check what is not about sampling.

    Raises:
        ApiError: 400 that names the parameter.
    """
    _within("max_tokens", body.max_tokens, 1, 2**31)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options are only allowed when stream is true.")
    if body.stream_options is not None and body.stream_options.include_obfuscation:
        raise invalid("stream_options.include_obfuscation", "Obfuscation is not supported.", "unsupported_parameter")
    metadata = body.metadata or {}
    if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise invalid("metadata", "metadata takes at most 16 pairs of at most 64 and 512 characters.")
    for name in ("user", "safety_identifier", "prompt_cache_key"):
        if len(getattr(body, name) or "") > 512:
            raise invalid(name, f"{name} takes at most 512 characters.")


def _within(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # NaN is not within anything
        raise invalid(name, f"{value} is out of range: {name} must be from {low} to {high}.")


def _require_no_op(name: str, value: Any) -> None:
    if name not in NO_OP:
        raise ApiError("unknown_parameter", f"Unknown parameter: {name!r}.", name[:200])
    # `is`-like for booleans: 0 == False, and logprobs 0 is a request where logprobs false is none.
    if not any(value == harmless and isinstance(value, bool) == isinstance(harmless, bool) for harmless in NO_OP[name]):
        raise ApiError("unsupported_parameter", f"The parameter {name!r} is not supported with this value.", name)


_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


def _explain(fault: msgspec.ValidationError) -> ApiError:
    message = str(fault)
    path_match = _PATH.search(message)
    path = path_match.group(1) if path_match else ""
    reason = _PATH.sub("", message)
    for pattern, code, text in (
        (_UNKNOWN, "unknown_parameter", "Unknown parameter: {!r}."),
        (_MISSING, "missing_required_parameter", "Missing required parameter: {!r}."),
    ):
        if match := pattern.search(reason):
            param = f"{path}.{match.group(1)}" if path else match.group(1)
            return ApiError(code, text.format(param), param)
    return ApiError("invalid_type", f"Invalid value for {path!r}: {reason[:1].lower()}{reason[1:]}.", path or None)
