"""Reading of JSON bodies: each parameter is supported, has no effect, is ignored and named, or is rejected by name.

A parameter is supported (a field of the endpoint's struct), or documented and accepted only with the values at which it
has no effect (`NO_OP`), or a hint that may be ignored (`HINTS`), or rejected. Unknown fields of inference requests are
dropped and named (`unknown_fields`). Other bodies are read strictly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from inference_worker.contract.request import (
    SAMPLING_PARAMETERS,
    Logprobs,
    MinP,
    NumAnswers,
    Penalty,
    RepetitionPenalty,
    RequestRejected,
    SamplingParams,
    ServiceClass,
    Temperature,
    TopP,
    document,
)
from inference_worker.contract.sampling_defaults import NAMES, find_unset
from inference_worker.contract.validation import (
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    check_sampling,
)
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.json_numbers import decode_json
from millrace.gateway.core.types import MODEL_LENGTH
from millrace.gateway.protocols.documented import (
    MAX_LABEL_CHARACTERS,
    MAX_METADATA,
    MAX_METADATA_KEY_CHARACTERS,
    Label,
    LabelMap,
    NotEmpty,
    NotNegative,
    Positive,
)
from millrace.gateway.protocols.foreign_limits import equivalent
from millrace.gateway.protocols.openai.guided import StructuredOutputs
from millrace.gateway.protocols.unknown_fields import IgnoredFields, check_typos, tolerate

T = TypeVar("T", bound=msgspec.Struct)
C = TypeVar("C")

MAX_STOPS = 16
Bias = Annotated[float, document(minimum=-100, maximum=100)]
MAX_TOKENS = 2**31
_ANY_VOCABULARY = 2**31  # the engine checks the model's vocabulary

# Documented parameters that are not supported, with the values at which they have no effect. null always has none.
NO_OP: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),  # chat completions support it
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),  # has no effect without tools
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "prompt_cache_options": ({},),
    # vLLM's names.
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template_kwargs": ({},),
}
# Parameters of `NO_OP` that are accepted with every value. They are named as ignored unless they have no effect.
HINTS = frozenset(
    {
        *("store", "prediction", "reasoning_effort", "verbosity", "prompt_cache_retention", "prompt_cache_options"),
        "web_search_options",
    }
)
TIERS: Mapping[str, ServiceClass] = {
    "auto": ServiceClass.DEFAULT,
    "default": ServiceClass.DEFAULT,
    "flex": ServiceClass.FLEX,
    "priority": ServiceClass.PRIORITY,
}


# Names of parameters that change the result in some dialect. Where they are not supported, they are refused by name and
# never ignored as unknown fields.
RESULT_NAMES = frozenset(
    {
        *SAMPLING_PARAMETERS,
        *("stop_sequences", "top_logprobs", "echo", "max_completion_tokens", "max_output_tokens", "dimensions"),
        *("truncate", "truncate_prompt_tokens"),
        *("response_format", "guided_json", "guided_regex", "guided_grammar", "guided_choice", "structured_outputs"),
        *("tools", "tool_choice", "system", "instructions", "messages", "input", "prompt", "stream"),
        "inference_geo",  # a demand for a place
    }
)


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # a hint without effect


class Common(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The parameters that chat completions and completions share."""

    fewest_tokens: ClassVar[int] = 1  # the minimum of max_tokens

    model: str
    max_tokens: Positive | None = None
    n: NumAnswers | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, document(minimum=-1)] | None = None
    min_p: MinP | None = None
    seed: int | None = None
    stop: NotEmpty | Annotated[list[NotEmpty], document(maxItems=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[NotNegative], document(maxItems=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: NotNegative | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: Annotated[dict[int, Bias], document(maxProperties=MAX_LOGIT_BIAS)] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    add_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Logprobs | None = None
    truncate_prompt_tokens: Annotated[int, document(minimum=MODEL_LENGTH)] | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    priority: int | None = None
    speculation: Literal["auto", "off"] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Label | None = None
    safety_identifier: Label | None = None
    metadata: LabelMap | None = None
    prompt_cache_key: Label | None = None


def read_body(body: bytes, type_: type[T], no_op: Mapping[str, tuple[Any, ...]] = NO_OP) -> T:
    """Decode and validate a JSON body strictly: an unknown field is an error.

    Raises:
        ApiError: 400 that names the parameter.
    """
    fields = _decode(body)
    supported = _names(type_)
    values = {name: value for name, value in fields.items() if value is not None}
    for name in [name for name in values if name not in supported]:
        if name not in no_op:
            raise ApiError("unknown_parameter", f"Unknown parameter: {name!r}.", name[:200])
        if not _is_no_op(values.pop(name), no_op[name]):
            raise _unsupported(name)
    return convert(values, type_)


def read_request(
    body: bytes,
    type_: type[T],
    no_op: Mapping[str, tuple[Any, ...]] = NO_OP,
    hints: Collection[str] = HINTS,
    prepare: Callable[[dict[str, Any], IgnoredFields], None] | None = None,
    adapt: Callable[[dict[str, Any], IgnoredFields], None] | None = None,
) -> tuple[T, IgnoredFields]:
    """Decode and validate the JSON body of an inference request. Return it with its ignored fields.

    Args:
        no_op: parameters that are not supported, with their values that have no effect.
        hints: those of them that are accepted with every value, and named as ignored.
        prepare: changes the decoded fields before they are validated.
        adapt: changes them if they are not valid.

    Raises:
        ApiError: 400 that names the parameter.
    """
    fields = _decode(body)
    supported, unknown = _names(type_), []
    ignored = IgnoredFields(supported=supported)
    values = {name: value for name, value in fields.items() if value is not None}
    for name in [name for name in values if name not in supported]:
        value = values.pop(name)
        if name not in no_op:
            if name in RESULT_NAMES:
                raise _unknown_result(name, supported)
            if ignored.limits.examine(name, value):
                ignored.add_unknown(name)
            else:
                unknown.append(name)
        elif not _is_no_op(value, no_op[name]):
            if name not in hints:
                raise _unsupported(name)
            ignored.add_known(name)
    if unknown:
        check_typos(unknown, supported.union(no_op))
        for name in unknown:
            ignored.add_unknown(name)
    if prepare is not None:
        prepare(values, ignored)
    return converted_leniently(values, type_, "", ignored, adapt), ignored


def _unknown_result(name: str, supported: Collection[str]) -> ApiError:
    """Return the error of a parameter that changes the result in another dialect."""
    message, own = f"This endpoint does not support the parameter {name!r}.", equivalent(name, supported)
    return ApiError("unknown_parameter", message if own is None else f"{message} Use {own!r}.", name)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        fields = decode_json(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ApiError("invalid_json", f"The request body is not valid JSON: {exc}") from None
    if not isinstance(fields, dict):
        raise ApiError("invalid_json", "The request body must be a JSON object.")
    return fields


def convert(value: Any, type_: type[C], path: str = "") -> C:
    """Convert a part of a body, at `path`, to this type.

    Raises:
        ApiError: 400 that names the parameter.
    """
    try:
        return msgspec.convert(value, type_, str_keys=True)  # JSON keys are strings, also the token IDs of logit_bias
    except msgspec.ValidationError as exc:
        raise _explain(exc, path) from None


def converted_leniently(
    value: Any,
    type_: type[C],
    path: str,
    ignored: IgnoredFields,
    adapt: Callable[[Any, IgnoredFields], None] | None = None,
) -> C:
    """Convert a part of a body, at `path`. Unknown fields are removed from `value` and added to `ignored`.

    Args:
        adapt: changes the value first if it is not valid.

    Raises:
        ApiError: 400 that names the parameter.
    """
    try:
        return msgspec.convert(value, type_, str_keys=True)
    except msgspec.ValidationError:  # the usual body has no unknown fields and needs one conversion
        if adapt is not None:
            adapt(value, ignored)
        tolerate(value, type_, _INDEX.sub("[]", path), ignored)
        return convert(value, type_, path)


@cache
def _names(type_: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.name for field in msgspec.structs.fields(type_))


def sampling_params(body: Common, *, logprobs: int | None, prompt_logprobs: int | None = None) -> SamplingParams:
    """Return the sampling parameters after checking their ranges.

    Raises:
        ApiError: 400 that names the parameter.
    """
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"At most {MAX_STOPS} stop strings are allowed, not {len(stops)}.")
    values = {name: value for name in SAMPLING_PARAMETERS if (value := getattr(body, name)) is not None}
    values |= {
        "top_k": 0 if body.top_k == -1 else body.top_k or 0,  # -1 disables it, as in vLLM
        "stop": tuple(stops),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "logit_bias": tuple((body.logit_bias or {}).items()),
        "logprobs": logprobs,
        "prompt_logprobs": body.prompt_logprobs if prompt_logprobs is None else prompt_logprobs,
    }
    values.pop("max_tokens", None)  # admission sets it
    params = SamplingParams(**values)
    check_ranges(msgspec.structs.replace(params, max_tokens=body.max_tokens or MAX_TOKENS))
    return params


def find_unset_sampling(params: SamplingParams, body: msgspec.Struct) -> tuple[str, ...]:
    """Return the sampling parameters that the body does not set."""
    return find_unset(params, [name for name in NAMES if getattr(body, name, None) is not None])


def check_ranges(params: SamplingParams, **names: str) -> None:
    """Check the ranges of the sampling parameters. `names` maps their names to the dialect's, where they differ.

    Raises:
        ApiError: 400 that names the parameter.
    """
    try:
        check_sampling(params, _ANY_VOCABULARY)
    except RequestRejected as exc:
        name = exc.param or ""
        raise ApiError(exc.code, f"{exc.message}.", names.get(name, name)) from None


def name_obfuscation(options: StreamOptions | None, ignored: IgnoredFields) -> None:
    """Name the padding of events as ignored if it is requested. It does not change the answer."""
    if options is not None and options.include_obfuscation:
        ignored.add_known("stream_options.include_obfuscation")


def common_fields(body: Common, ignored: IgnoredFields) -> dict[str, Any]:
    """Return the parameters other than sampling, by their names in `InferenceRequest`.

    Raises:
        ApiError: 400 that names the parameter.
    """
    within("max_tokens", body.max_tokens, body.fewest_tokens, MAX_TOKENS)
    check_truncation(body.truncate_prompt_tokens)
    within("priority", body.priority, -(2**31), 2**31 - 1)
    options = body.stream_options
    if options is not None and body.stream is None:  # with stream=false they have no effect
        raise invalid("stream_options", "stream_options are only allowed when stream is true.")
    name_obfuscation(options, ignored)
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs are only allowed when stream is false.")
    metadata = body.metadata or {}
    check_labels(metadata, {name: getattr(body, name) for name in LABELS})
    return {
        "model": body.model,
        "service_class": TIERS[body.service_tier or "auto"],
        "priority": body.priority or 0,
        "speculates": body.speculation != "off",
        "cache_key": body.prompt_cache_key,
        "metadata": metadata,
        "user": body.safety_identifier or body.user,
        "stream": bool(body.stream),
        "include_usage": bool(options and options.include_usage),
        "continuous_usage": bool(options and options.continuous_usage_stats),
    }


LABELS = ("user", "safety_identifier", "prompt_cache_key")


def check_labels(metadata: Mapping[str, str], labels: Mapping[str, str | None]) -> None:
    """Check the lengths of metadata and labels.

    Raises:
        ApiError: 400 that names the parameter.
    """
    if len(metadata) > MAX_METADATA or any(
        len(key) > MAX_METADATA_KEY_CHARACTERS or len(value) > MAX_LABEL_CHARACTERS for key, value in metadata.items()
    ):
        raise invalid(
            "metadata",
            f"metadata may have at most {MAX_METADATA} entries, with keys of up to {MAX_METADATA_KEY_CHARACTERS} and"
            f" values of up to {MAX_LABEL_CHARACTERS} characters.",
        )
    for name, label in labels.items():
        if len(label or "") > MAX_LABEL_CHARACTERS:
            raise invalid(name, f"{name} may have at most {MAX_LABEL_CHARACTERS} characters.")


def within(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise invalid(name, f"{value} is out of range. {name} must be from {low} to {high}.")


def check_truncation(max_tokens: int | None) -> None:
    """Check `truncate_prompt_tokens`.

    Raises:
        ApiError: 400 that names the parameter.
    """
    if max_tokens != MODEL_LENGTH:
        within("truncate_prompt_tokens", max_tokens, 1, MAX_TOKENS)


def _is_no_op(value: Any, no_op_values: tuple[Any, ...]) -> bool:
    # Booleans match only booleans: in Python 0 == False, but logprobs=0 requests logprobs and logprobs=false does not.
    return any(
        value == no_op_value and isinstance(value, bool) == isinstance(no_op_value, bool)
        for no_op_value in no_op_values
    )


def _unsupported(name: str) -> ApiError:
    return ApiError("unsupported_parameter", f"The parameter {name!r} is not supported with this value.", name)


_INDEX = re.compile(r"\[\d+\]")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


def _explain(exc: msgspec.ValidationError, parent_path: str) -> ApiError:
    message = str(exc)
    path_match = _PATH.search(message)
    own_path = path_match.group(1) if path_match else ""
    separator = "." if parent_path and own_path and not own_path.startswith("[") else ""
    path = f"{parent_path}{separator}{own_path}"
    reason = _PATH.sub("", message)
    for pattern, code, text in (
        (_UNKNOWN, "unknown_parameter", "Unknown parameter: {!r}."),
        (_MISSING, "missing_required_parameter", "Missing required parameter: {!r}."),
    ):
        if match := pattern.search(reason):
            param = f"{path}.{match.group(1)}" if path else match.group(1)
            return ApiError(code, text.format(param), param)
    return ApiError("invalid_type", f"Invalid value for {path!r}: {reason[:1].lower()}{reason[1:]}.", path or None)
