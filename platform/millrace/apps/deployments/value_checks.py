"""Checks of the values of a deployment, which read nothing but its row and its credential."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args
from urllib.parse import urlsplit

from inference_worker.contract.command_line import format_command
from inference_worker.contract.deployments import MAX_DEPLOYMENTS
from inference_worker.contract.engine_config import DTypeName, KVCacheDTypeName, QuantizationName, SpeculationName
from inference_worker.contract.managed_commands import parse_command
from inference_worker.contract.output_formats import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS
from inference_worker.contract.sampling_defaults import parse_sampling_defaults
from inference_worker.contract.settings import (
    EMBEDDED,
    MODEL_NAME,
    ControlTokensName,
    check_draft_model,
    read_kv_cache_memory,
)
from inference_worker.contract.texts import Text, text_of
from inference_worker.contract.upstream_presets import UpstreamPreset, preset_of
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from millrace.apps.deployments.models import GENERATE, MILLRACE, Deployment
from tenants.actions.common import FieldRefused
from tenants.actions.credentials import check_secret
from tenants.models import UpstreamCredential
from tenants.webhooks.targets import TargetRefused, parse

MAX_POOLS = 32
MAX_CONCURRENCY = 10_000
MAX_COMMAND_LENGTH = 4000
COMMAND_EXAMPLE = "vllm serve {model} --host {host} --port {port}"
ENGINES = (MILLRACE, *(engine.value for engine in UpstreamEngine))
MAX_IDLE_SECONDS = 30 * 86_400
POOL_NAME = MODEL_NAME
RESERVED_NAMES = ("check", "import")  # paths of the API, below /api/operator/deployments
_RANGES = {
    "max_model_len": (16, 1 << 24),
    "block_size": (1, 256),
    "default_max_tokens": (1, 1 << 24),
    "dimensions": (1, 65_536),
}
_CHOICES: Mapping[str, Sequence[str]] = {
    "dtype": get_args(DTypeName),
    "task": (GENERATE, "embed"),
    "quantization": get_args(QuantizationName),
    "kv_cache_dtype": get_args(KVCacheDTypeName),
    "tool_parser": (AUTO, NONE, *TOOL_FORMATS),
    "reasoning_parser": (AUTO, NONE, *REASONING_FORMATS),
    "speculation": ("", *get_args(SpeculationName)),
    "control_tokens": get_args(ControlTokensName),
}


def check_values(row: Deployment) -> None:
    """Check the values of a deployment.

    Raises:
        FieldRefused: names the field.
    """
    if not re.fullmatch(MODEL_NAME, row.name):
        message = Text("Enter 1 to 64 of a-z 0-9 . _ - that start with a letter or digit.")
        raise FieldRefused("name", "invalid", message)
    if row.name in RESERVED_NAMES and row.imported is None:
        raise FieldRefused("name", "invalid", Text("%(name)s is reserved. Choose another name.", name=repr(row.name)))
    if row.engine not in ENGINES:
        raise FieldRefused("engine", "invalid", Text("Enter one of %(engines)s.", engines=", ".join(ENGINES)))
    if row.engine != MILLRACE:
        _check_upstream(row)
    elif unused := [field for field in ("upstream_model", "preset", "credential_id", "command") if getattr(row, field)]:
        raise FieldRefused(unused[0], "invalid", Text("Only for upstreams. Remove it, or choose another engine."))
    if not row.source or len(row.source) > 1024:
        raise FieldRefused(
            "source",
            "invalid",
            Text("Enter %(embedded)s, a model directory or a .gguf file.", embedded=", ".join(EMBEDDED)),
        )
    for field, known in _CHOICES.items():
        if getattr(row, field) not in known:
            raise FieldRefused(field, "invalid", Text("Enter one of %(known)s.", known=", ".join(known)))
    for field, (least, most) in _RANGES.items():
        value = getattr(row, field)
        if value is not None and not least <= value <= most:
            raise FieldRefused(
                field, "invalid", Text("Enter a number from %(least)s to %(most)s.", least=least, most=most)
            )
    if not 0 <= row.idle_seconds <= MAX_IDLE_SECONDS:
        raise FieldRefused(
            "idle_seconds",
            "invalid",
            Text("Enter a number from 0 to %(max_idle_seconds)s.", max_idle_seconds=MAX_IDLE_SECONDS),
        )
    if len(row.revision) > 128:
        raise FieldRefused("revision", "invalid", Text("Enter at most 128 characters."))
    if len(row.draft_model) > 1024:
        raise FieldRefused("draft_model", "invalid", Text("Enter at most 1024 characters."))
    try:
        check_draft_model(row.draft_model)
    except ValueError as exc:
        raise FieldRefused(
            "draft_model", "invalid", Text("%(error)s.", error=str(exc).removeprefix("draft_model: "))
        ) from exc
    try:
        defaults = parse_sampling_defaults(row.sampling_defaults)
    except ValueError as exc:
        raise FieldRefused("sampling_defaults", "invalid", Text("%(error)s.", error=text_of(exc))) from exc
    if defaults and row.engine != MILLRACE:
        raise FieldRefused("sampling_defaults", "invalid", Text("An upstream has its own. Enter auto or none."))
    if not row.truncate_inputs and row.engine != MILLRACE:
        raise FieldRefused("truncate_inputs", "invalid", Text("An upstream truncates its inputs itself. Remove it."))
    try:
        read_kv_cache_memory(row.kv_cache_memory)
    except ValueError as exc:
        raise FieldRefused(
            "kv_cache_memory", "invalid", Text("Enter a size or a share: %(error)s.", error=text_of(exc))
        ) from exc
    _check_pools(row.pools)


def _check_upstream(row: Deployment) -> None:
    """Check the fields of an upstream, and set the base URL of its preset if none is given.

    Raises:
        FieldRefused: names the field.
    """
    if not 1 <= len(row.upstream_model) <= 256 or not row.upstream_model.isprintable():
        raise FieldRefused("upstream_model", "invalid", Text("Enter the model's name at the upstream."))
    if not 1 <= row.concurrency <= MAX_CONCURRENCY:
        raise FieldRefused(
            "concurrency",
            "invalid",
            Text("Enter a number from 1 to %(max_concurrency)s.", max_concurrency=MAX_CONCURRENCY),
        )
    if row.task == "embed" and (row.dimensions is None or row.engine == UpstreamEngine.ANTHROPIC):
        message = Text("Enter the vector size. Anthropic's protocol has no embeddings.")
        raise FieldRefused("dimensions", "invalid", message)
    if row.engine == UpstreamEngine.MANAGED:
        _check_managed(row)
    elif row.command:
        raise FieldRefused("command", "invalid", Text("Only the engine managed has a command. Remove it."))
    preset = check_preset(row)
    if row.engine != UpstreamEngine.MANAGED:
        check_base_url(row, preset)


def check_preset(row: Deployment) -> UpstreamPreset:
    """Return the preset of an upstream.

    Raises:
        FieldRefused: there is no such preset, or it has another protocol.
    """
    try:
        return preset_of(UpstreamSpec(UpstreamEngine(row.engine), row.source, row.upstream_model, preset=row.preset))
    except ValueError as exc:
        raise FieldRefused("preset", "invalid", Text("%(error)s.", error=text_of(exc))) from exc


def check_base_url(row: Deployment, preset: UpstreamPreset) -> None:
    """Check the base URL of an upstream without resolving its host. Set that of its preset if none is given.

    Raises:
        FieldRefused: it is missing or invalid, or its host is internal.
    """
    row.source = (row.source or preset.base_url).rstrip("/")
    if not row.source:
        raise FieldRefused("base_url", "invalid", Text("Enter the base URL of the upstream, such as https://host/v1."))
    invalid = FieldRefused("base_url", "invalid", Text("Enter an http:// or https:// URL without a query."))
    try:
        parts = urlsplit(row.source)
    except ValueError as exc:
        raise invalid from exc
    if parts.query or parts.scheme not in ("https", "http"):
        raise invalid
    try:
        parse(row.source, (parts.hostname or "",) if row.allow_internal else ())
    except (TargetRefused, ValueError) as exc:
        raise make_base_url_error(exc) from exc


def _check_managed(row: Deployment) -> None:
    """Check the fields of a managed engine, and set its source.

    Raises:
        FieldRefused: names the field.
    """
    if not 1 <= len(row.command) <= MAX_COMMAND_LENGTH:
        raise FieldRefused(
            "command",
            "invalid",
            Text("Enter the command that starts the engine, such as `%(example)s`.", example=COMMAND_EXAMPLE),
        )
    try:
        parse_command(row.command)
    except ValueError as exc:
        raise FieldRefused("command", "invalid", Text("%(error)s.", error=text_of(exc))) from exc
    if row.upstream_model.startswith("-"):
        raise FieldRefused("upstream_model", "invalid", Text("Enter a name that does not start with a hyphen."))
    if row.credential_id is not None:
        raise FieldRefused("credential_id", "invalid", Text("A managed engine has no credential. Remove it."))
    if row.allow_internal:
        raise FieldRefused("allow_internal", "invalid", Text("A managed engine is always internal. Remove it."))
    if row._state.adding and row.source not in ("", row.upstream_model):
        raise FieldRefused("base_url", "invalid", Text("A managed engine has no base URL. Remove it."))
    row.source = row.upstream_model


def make_base_url_error(exc: ValueError) -> FieldRefused:
    """Return the error of a base URL that is invalid or internal."""
    reason = exc.reason if isinstance(exc, TargetRefused) else str(exc)  # without the advice for webhooks
    message = Text(
        "%(reason)s Use an https:// URL with a public address, or allow internal addresses for this deployment.",
        reason=reason,
    )
    return FieldRefused("base_url", "base_url_refused", message)


def check_new_secret(row: Deployment, secret: str | None) -> None:
    """Check a secret that is stored with a new deployment.

    Raises:
        FieldRefused: the deployment needs no secret, or it is not valid.
    """
    if secret is None:
        return
    if row.engine == MILLRACE or row.credential_id is not None:
        raise FieldRefused("secret", "invalid", Text("Send a secret only for an upstream, and without a credential."))
    check_secret(secret)


def check_credential(row: Deployment) -> None:
    """Check that the credential exists and belongs to the platform. Inside `all_tenants_scope(…)`."""
    if row.credential_id is None:
        return
    if not UpstreamCredential.objects.all_tenants().filter(pk=row.credential_id, tenant=None).exists():
        listing = format_command("credentials list --platform")
        message = Text(
            "The platform has no credential %(credential_id)s. List them with `%(listing)s`.",
            credential_id=str(row.credential_id),
            listing=listing,
        )
        raise FieldRefused("credential_id", "invalid", message)


def _check_pools(pools: Any) -> None:
    is_valid = (
        isinstance(pools, dict)
        and 0 < len(pools) <= MAX_POOLS
        and all(
            re.fullmatch(POOL_NAME, str(pool)) and type(count) is int and 0 <= count <= MAX_DEPLOYMENTS
            for pool, count in pools.items()
        )
    )
    if not is_valid:
        message = Text(
            'Enter the number of replicas of each worker pool, such as {"default": 1}; 0: one on each worker.'
        )
        raise FieldRefused("pools", "invalid", message)
