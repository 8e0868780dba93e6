"""The request to an upstream: what it carries, what it refuses, and the bound of its prompt's tokens.

Within one dialect, messages, tools and unknown fields are carried as they were sent. Across dialects, they are written
from the internal form. A parameter that changes the result and that the upstream lacks is refused. Others are named as
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from inference_worker.contract.request import SAMPLING_PARAMETERS, SamplingParams
from inference_worker.contract.upstream_presets import UpstreamPreset, preset_of
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamOperation, UpstreamRequest, UpstreamSpec
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError, invalid
from millrace.gateway.core.types import InferenceRequest, Prompt
from millrace.gateway.protocols.truncation import TRUNCATION_NAMES
from millrace.gateway.protocols.upstreams import anthropic, openai
from millrace.gateway.protocols.upstreams.images import image_parts, require_images

CHAT_READERS = ("openai.chat", "openai.realtime")
MESSAGES_READERS = ("anthropic.messages", "anthropic.count")
BYTES_PER_TOKEN = 4  # bytes per token in the estimate; the bound has one byte for each token
MESSAGE_TOKENS = 16  # the most that a template adds to a message
_DEFAULTS = SamplingParams()
# Unknown fields that are not carried: they would change where a request runs, what is stored, or what it costs.
_NOT_CARRIED = frozenset(
    {
        *("model", "stream", "stream_options", "service_tier", "store", "background", "container", "mcp_servers"),
        *(
            "web_search_options",
            "context_management",
            "prediction",
            "modalities",
            "audio",
            "user",
            "metadata",
            "models",
        ),
        *(
            "provider",
            "plugins",
            "route",
            "transforms",
            "fallbacks",
            "api_key",
            "api_base",
            "base_url",
            "extra_headers",
            "extra_body",
        ),
        # Other names of the maximum output, and other answers than the reserved ones.
        *("max_new_tokens", "max_length", "n_predict", "num_predict", "best_of", "use_beam_search", "options"),
        # Prices, places and searches of the provider.
        *("speed", "inference_geo", "search_parameters", "web_search", "enable_search", "data_sources"),
        # Addresses, adapters, cache slots and queues of servers that run models.
        *("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room", "lora", "lora_path", "id_slot"),
        *("session_id", "session_params", "cache_salt", "priority", "data_parallel_rank", "chat_template"),
    }
)


def upstream_prompt(model: ServedModel, request: InferenceRequest) -> Prompt:
    """Return the prompt of a request to a model that an upstream runs.

    Raises:
        ApiError: 400, the upstream cannot run the request.
    """
    upstream = model.upstream
    if upstream is None:
        raise AssertionError("the model has an upstream")
    preset = preset_of(upstream)
    source = _source(request)
    if "speed" in request.analysis.ignored and "speed" not in request.analysis.unknown:
        raise _unsupported("speed", "This model's provider charges by speed. Omit it, or set it to 'standard'.")
    ignored = dict.fromkeys(request.analysis.ignored)
    raw: dict[str, Any] = {}  # the fields of the body, if the upstream has its dialect
    if request.encoder.inputs:
        operation, fields = _embeddings(upstream, request, source)
    else:
        _check(upstream, request)
        parameters = _parameters(preset, request, source)
        if upstream.protocol == UpstreamEngine.ANTHROPIC:
            raw = source if _reader(request) in MESSAGES_READERS else {}
            operation, fields = "messages", anthropic.fields(upstream, request, parameters, raw, ignored)
        elif isinstance(request.prompt, str):
            raw = source
            operation, fields = (
                "completions",
                {"prompt": request.prompt, **openai.rename_parameters(preset, parameters)},
            )
        else:
            raw = source if _reader(request) in CHAT_READERS else {}
            operation, fields = "chat", openai.fields(upstream, preset, request, parameters, source, raw, ignored)
        for name in request.analysis.loosened:
            # Schemas are carried as they were sent, except the answer's in the other dialect.
            if name.startswith("tools") or upstream.protocol != UpstreamEngine.ANTHROPIC:
                ignored.pop(name, None)
        for name in request.analysis.unknown:
            # The platform sets the cache key, so that tenants share no cache of the provider.
            if not raw or name in _NOT_CARRIED or name == preset.cache_key:
                continue
            if name in raw:
                fields.setdefault(name, raw[name])
            ignored.pop(name, None)
    for name, message in request.analysis.foreign_limits:
        if name.partition(".")[0] in _NOT_CARRIED or name.partition(".")[0] not in raw:
            raise _unsupported(name, message)
    return _prompt(model, preset, request, operation, msgspec.json.encode(fields), tuple(ignored))


def _prompt(
    model: ServedModel,
    preset: UpstreamPreset,
    request: InferenceRequest,
    operation: UpstreamOperation,
    body: bytes,
    ignored: tuple[str, ...],
) -> Prompt:
    images = image_parts(request.prompt)
    messages = len(request.prompt) if isinstance(request.prompt, list) else 1
    size = max(0, len(body) - sum(len(part["url"]) for part in images))
    overhead = preset.prompt_overhead + MESSAGE_TOKENS * messages + preset.image_tokens * len(images)
    if request.encoder.inputs:
        bound, overhead = size, 0
    else:
        # The upstream's context bounds the prompt too.
        output = request.max_tokens or min(model.default_max_output, model.context_length // 2)
        bound = max(1, min(size + overhead, model.context_length - output))
    estimate = min(bound, -(-size // BYTES_PER_TOKEN) + preset.image_tokens * len(images))
    return Prompt(
        [],
        input_lengths=(1,) * len(request.encoder.inputs),
        upstream=UpstreamRequest(operation, body, bound, max(1, estimate)),
        ignored=ignored,
    )


def _reader(request: InferenceRequest) -> str:
    return "" if request.analysis.source is None else request.analysis.source.reader


def _source(request: InferenceRequest) -> dict[str, Any]:
    """Return the fields of the body that the request was read from."""
    if request.analysis.source is None:
        return {}
    fields: dict[str, Any] = msgspec.json.decode(request.analysis.source.body)
    return {name: value for name, value in fields.items() if value is not None}


def _check(upstream: UpstreamSpec, request: InferenceRequest) -> None:
    if isinstance(request.prompt, list) and (not request.prompt or isinstance(request.prompt[0], int)):
        raise _unsupported("prompt", "Token IDs cannot be sent to this model's provider. Send text.")
    if isinstance(request.prompt, str) and upstream.protocol == UpstreamEngine.ANTHROPIC:
        raise invalid("model", "This model's provider has no completions. Use /v1/chat/completions or /v1/messages.")
    if request.echo:
        raise _unsupported("echo", "This model's provider does not return the prompt.")
    template = request.template
    for name, is_given in {
        "chat_template_kwargs": bool(template.variables),
        "truncate_prompt_tokens": template.max_tokens is not None,
        "add_special_tokens": template.special_tokens is not None,
        "add_generation_prompt": not template.adds_prompt,
    }.items():
        if is_given:
            raise _unsupported(name, f"This model's provider has no {name}. Omit it.")
    if request.tools and not upstream.tools:
        raise _unsupported("tools", "This model calls no tools. Omit tools, or use another model.")
    require_images(request, is_supported=upstream.images, allow_urls=not upstream.is_internal)


def _parameters(preset: UpstreamPreset, request: InferenceRequest, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters to carry. An upstream may lack all but `max_tokens`.

    Raises:
        ApiError: 400, the upstream lacks one.
    """
    found = {}
    for name in SAMPLING_PARAMETERS:
        value, default = getattr(request.sampling, name), getattr(_DEFAULTS, name)
        if name == "max_tokens" or (value == default and name not in source):
            continue
        if name not in preset.parameters:
            if value == default:
                continue
            public = "stop_sequences" if name == "stop" and "stop_sequences" in source else name
            raise _unsupported(public, f"This model's provider has no {public}. Omit it, or use another model.")
        found[name] = value
    return found


def _embeddings(
    upstream: UpstreamSpec, request: InferenceRequest, source: Mapping[str, Any]
) -> tuple[UpstreamOperation, dict[str, Any]]:
    """Return the request for vectors. The upstream truncates long inputs or refuses them, as the request says."""
    if upstream.protocol == UpstreamEngine.ANTHROPIC or request.encoder.queries:
        raise invalid("model", "This model's provider has no embeddings.")
    fields: dict[str, Any] = {"input": list(request.encoder.inputs), "encoding_format": "float"}
    if any(not isinstance(item, str) for item in request.encoder.inputs):
        raise _unsupported("input", "Token IDs cannot be sent to this model's provider. Send text.")
    if (dimensions := request.echoed_parameters.get("dimensions")) is not None:
        fields["dimensions"] = dimensions
    fields |= {name: source[name] for name in TRUNCATION_NAMES if name in source}
    return "embeddings", fields


def _unsupported(param: str, message: str) -> ApiError:
    return ApiError("unsupported_parameter", message, param)
