"""The catalog of deployments.

PostgreSQL contains the deployments, and changes are in the audit log. A key in Valkey is a copy, which workers and
gateways read twice a second. It is written after each change and once a minute, which repairs a copy that was lost or
not written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple, get_args
from urllib.parse import urlsplit

import msgspec
import redis
import structlog
from django.conf import settings
from django.db import connection, transaction

from billing.models import CompiledRateCard, PriceVersion
from billing.pricing import demo_prices
from billing.pricing.prices import do_propose_prices
from billing.rates.price_book import NewPrice, Proposal, ranges_of
from inference_worker.checkpoints.encoder_config import model_task
from inference_worker.checkpoints.model_config import ModelError
from inference_worker.contract import valkey
from inference_worker.contract.command_line import format_command
from inference_worker.contract.compute_support import find_refusal
from inference_worker.contract.deployments import (
    ALL_WORKERS,
    MAX_DEPLOYMENTS,
    WANTED_KEY,
    WantedDeployment,
    WantedDeployments,
    WantedState,
    encode_wanted,
)
from inference_worker.contract.engine_config import DTypeName, KVCacheDTypeName, QuantizationName, SpeculationName
from inference_worker.contract.managed_commands import parse_command, sign_managed
from inference_worker.contract.output_formats import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS
from inference_worker.contract.sampling_defaults import parse_sampling_defaults
from inference_worker.contract.settings import (
    EMBEDDED,
    MODEL_NAME,
    ControlTokensName,
    ModelSpec,
    check_draft_model,
    read_kv_cache_memory,
)
from inference_worker.contract.texts import Text, text_of
from inference_worker.contract.upstream_presets import preset_of
from inference_worker.contract.upstreams import UpstreamEngine, UpstreamSpec
from millrace.apps.deployments.fleet_status import FleetStatus, read_fleet_status
from millrace.apps.deployments.models import GENERATE, MILLRACE, Deployment, RemovedDeployment
from millrace.apps.deployments.source_checks import check_source
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.actions.common import FieldRefused
from tenants.actions.credentials import check_secret, do_create_credential
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import UpstreamCredential, User
from tenants.webhooks.targets import TargetRefused, check_url, parse

log = structlog.get_logger(__name__)

DEFAULT_POOLS = {"default": 1}
MAX_POOLS = 32
MAX_CONCURRENCY = 10_000
MAX_COMMAND_LENGTH = 4000
COMMAND_EXAMPLE = "vllm serve {model} --host {host} --port {port}"
ENGINES = (MILLRACE, *(engine.value for engine in UpstreamEngine))
MAX_IDLE_SECONDS = 30 * 86_400
POOL_NAME = MODEL_NAME
RESERVED_NAMES = ("check", "import")  # paths of the API, below /api/operator/deployments
OPTIONS = tuple(name for name in Deployment.AUDITED if name not in ("name", "source", "state"))
SOURCE_OPTIONS = ("source", "quantization", "max_model_len", "draft_model")  # options that the check of a source reads
WORKER_OPTIONS = ("dtype", "kv_cache_dtype", "pools")  # options whose possible values depend on the workers
_LOCK = 0x6465706C  # the number of an advisory lock; unique in the database
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


def served_specs(*, wanted_loaded: bool = False) -> tuple[ModelSpec, ...]:
    """Return the deployments of the catalog; those of the settings until the first import.

    Args:
        wanted_loaded: without the drained and unloaded ones.
    """
    with all_tenants_scope(BypassReason.OPERATOR):
        served = served_states()
    return tuple(spec for spec, state, _ in served if not wanted_loaded or state == WantedState.LOADED)


class ServedState(NamedTuple):
    """A deployment with the state that an operator wants it to have."""

    spec: ModelSpec
    state: WantedState = WantedState.LOADED
    idle_seconds: int = 0


def served_states() -> list[ServedState]:
    """Return the deployments of the catalog; those of the settings until the first import.

    Inside `all_tenants_scope(…)`.
    """
    rows = list(Deployment.objects.all())
    if not rows and not RemovedDeployment.objects.exists():
        return [ServedState(spec) for spec in settings.MILLRACE.models]
    return [ServedState(row.spec, WantedState(row.state), row.idle_seconds) for row in rows]


def do_add_deployment(
    name: str, source: str = "", *, state: WantedState = WantedState.LOADED, secret: str | None = None, **options: Any
) -> Deployment:
    """Add a deployment. Workers of its pools load it.

    Args:
        secret: the API key at the upstream. It is stored as a credential with the deployment's name.

    Raises:
        Conflict: the name is taken. ActionRefused: a value is invalid.
    """
    row = Deployment(name=name, source=source, state=state, **{"pools": DEFAULT_POOLS, **options})
    _check(row)
    _check_secret(row, secret)
    if row.imported is None:  # the models of the settings are served, or refused by their worker
        check_workers(row, read_board())
    with all_tenants_scope(BypassReason.OPERATOR):
        _lock()
        if not Deployment.objects.exists() and row.imported is None:  # the models of the settings stay
            do_import_settings(settings.MILLRACE.models)
        if Deployment.objects.filter(name=name).exists():
            raise Conflict(
                Text("The deployment %(name)s exists already. Choose another name, or update it.", name=repr(name))
            )
        if Deployment.objects.count() >= MAX_DEPLOYMENTS:
            raise Conflict(
                Text(
                    "There are %(max_deployments)s deployments already. Remove one first.",
                    max_deployments=MAX_DEPLOYMENTS,
                )
            )
        if secret is not None:
            row.credential_id = do_create_credential(None, name, secret).pk
        _check_credential(row)
        row.save(force_insert=True)
        audit.record("deployment.created", row, tenant_id=None, after=audit.serialize_for_audit(row))
        transaction.on_commit(_publish)
    return row


def do_update_deployment(name: str, *, checks_workers: bool = True, **changes: Any) -> Deployment:
    """Change options of a deployment. A change of what replicas load is a new version, which replaces the old one.

    Args:
        checks_workers: refuse options that no worker of the pools supports.

    Raises:
        Conflict: it does not exist. ActionRefused: a value is invalid.
    """
    with all_tenants_scope(BypassReason.OPERATOR):
        row = _lock_deployment(name)
        before = audit.serialize_for_audit(row)
        for option, value in changes.items():
            setattr(row, option, value)
        _check(row)
        if checks_workers and any(before[option] != getattr(row, option) for option in WORKER_OPTIONS):
            check_workers(row, read_board())
        _check_credential(row)
        after = audit.serialize_for_audit(row)
        if before != after:
            row.save()
            audit.record("deployment.updated", row, tenant_id=None, before=before, after=after)
            transaction.on_commit(_publish)
    return row


def do_set_deployment_state(name: str, state: WantedState) -> Deployment:
    """Set the state that the deployment's replicas reach: loaded, drained or unloaded. Idempotent.

    Raises:
        Conflict: it does not exist.
    """
    return do_update_deployment(name, state=state)


def do_remove_deployment(name: str) -> None:
    """Remove a deployment. Its running streams end, then its replicas are unloaded. Prices and usage stay.

    Raises:
        Conflict: it does not exist.
    """
    with all_tenants_scope(BypassReason.OPERATOR):
        row = _lock_deployment(name)
        if row.imported is not None:
            RemovedDeployment.objects.create(name=name, imported=row.imported)
        _remove(row)


def _remove(row: Deployment) -> None:
    audit.record("deployment.removed", row, tenant_id=None, before=audit.serialize_for_audit(row))
    row.delete()
    transaction.on_commit(_publish)


def do_import_deployments(entries: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Create or update the deployments of a file, in one transaction. Others stay as they are. Idempotent.

    Returns:
        The names of the created, updated and unchanged deployments.

    Raises:
        ActionRefused: an entry is invalid; nothing is changed.
    """
    result: dict[str, list[str]] = {"created": [], "updated": [], "unchanged": []}
    with all_tenants_scope(BypassReason.OPERATOR):
        _lock()
        if not Deployment.objects.exists():
            do_import_settings(settings.MILLRACE.models)
        known = {row.name: row for row in Deployment.objects.all()}
        for entry in entries:
            options = dict(entry)
            name = str(options.pop("name", ""))
            try:
                if name not in known:
                    do_add_deployment(name, **options)
                    result["created"].append(name)
                    continue
                before = audit.serialize_for_audit(known[name])
                after = audit.serialize_for_audit(do_update_deployment(name, **options))
                result["unchanged" if before == after else "updated"].append(name)
            except ActionRefused as exc:
                raise ActionRefused(
                    Text("Deployment %(name)s: %(error)s", name=repr(name), error=text_of(exc))
                ) from exc
    return result


def do_import_settings(specs: Iterable[ModelSpec]) -> None:
    """Import the models of MILLRACE_MODELS when the platform starts. Each has the worker pool of its name.

    A deployment is added or changed only if its setting has changed since the last import, so that changes and removals
    by operators stay. A deployment that was imported and is not in the settings any more is removed.
    """
    specs = list(specs)
    with all_tenants_scope(BypassReason.BOOTSTRAP):
        _lock()
        known = {row.name: row for row in Deployment.objects.all()}
        imports = dict(RemovedDeployment.objects.values_list("name", "imported"))
        imports |= {row.name: row.imported for row in known.values() if row.imported is not None}
        # Options that an earlier release did not store.
        defaults = {field.name: field.default for field in fields(ModelSpec) if field.default is not MISSING}
        for spec in specs:
            values = msgspec.to_builtins(spec)
            if spec.name in imports and defaults | imports[spec.name] == values:
                continue
            if spec.name not in known:
                do_add_deployment(spec.name, pools={spec.name: ALL_WORKERS}, imported=values, **_options_of(spec))
            else:
                do_update_deployment(spec.name, checks_workers=False, **_options_of(spec))
                Deployment.objects.filter(name=spec.name).update(imported=values)
            RemovedDeployment.objects.filter(name=spec.name).delete()
        names = {spec.name for spec in specs}
        for row in known.values():
            if row.imported is not None and row.name not in names:
                _remove(row)
        RemovedDeployment.objects.exclude(name__in=names).delete()
        transaction.on_commit(_publish)


def copy_deployments() -> int:
    """Replace the copy in Valkey. Returns the number of deployments.

    Raises:
        redis.RedisError: Valkey cannot be reached.
    """
    with all_tenants_scope(BypassReason.OPERATOR), valkey.connect(settings.MILLRACE.valkey_url, valkey.PAGES) as broker:
        _lock()  # NOTE: locked while the copy is written, so that an older copy cannot replace a newer one
        wanted = WantedDeployments(tuple(_sign_deployment(row.wanted) for row in Deployment.objects.all()))
        is_imported = bool(wanted.deployments) or RemovedDeployment.objects.exists()
        if is_imported or broker.exists(WANTED_KEY):  # otherwise workers use their settings
            broker.set(WANTED_KEY, encode_wanted(wanted))
    return len(wanted.deployments)


def _sign_deployment(wanted: WantedDeployment) -> WantedDeployment:
    """Return the deployment with the signature of its command, if it is managed and the platform has the secret."""
    spec, secret = wanted.spec, settings.MILLRACE.worker_secret
    if spec.upstream is None or spec.upstream.engine != UpstreamEngine.MANAGED or not secret:
        return wanted
    upstream = replace(spec.upstream, signature=sign_managed(spec.name, spec.upstream, secret))
    return msgspec.structs.replace(wanted, spec=replace(spec, upstream=upstream))


class CheckedDeployment(NamedTuple):
    """The result of a check: the model's task, and why the options were not checked against workers."""

    task: str
    unchecked: str = ""


def read_board() -> FleetStatus | None:
    """Return the replicas and their workers, or None if Valkey cannot be reached."""
    try:
        return read_fleet_status()
    except redis.RedisError:
        return None


def check_deployment(
    name: str, source: str = "", *, secret: str | None = None, force: bool = False, **options: Any
) -> CheckedDeployment:
    """Check a deployment's values and its source without changing anything. An upstream is not called.

    Args:
        force: leave out the check of the source, which its workers may have and this machine not.

    Raises:
        Conflict: the name is taken. ActionRefused: a value is invalid, or the source cannot be served.
    """
    row = Deployment(name=name, source=source, state=WantedState.LOADED, **{"pools": DEFAULT_POOLS, **options})
    _check(row)
    _check_secret(row, secret)
    with all_tenants_scope(BypassReason.OPERATOR):
        if Deployment.objects.filter(name=name).exists():
            raise Conflict(
                Text("The deployment %(name)s exists already. Choose another name, or update it.", name=repr(name))
            )
        _check_credential(row)
    if row.engine == MILLRACE:
        unchecked = check_workers(row, read_board())
        if not force:
            check_source(row.spec)
        return CheckedDeployment(model_task(row.source), unchecked)
    check_public(row)
    return CheckedDeployment(deployment_task(row))


def check_new_source(fields: dict[str, Any]) -> None:
    """Check the source of a deployment that is to be added, unless `force`, which is removed from its fields, is true.

    Call it outside of transactions: it reads the files of the source.

    Raises:
        Conflict: the name is taken. ActionRefused: a value is invalid, or the source cannot be served.
    """
    if not fields.pop("force", False) and fields.get("engine", MILLRACE) == MILLRACE:
        check_deployment(**fields)


def check_changed_source(name: str, changes: dict[str, Any]) -> None:
    """Check the source of a deployment whose changes concern it, as `check_new_source` does.

    Raises:
        ActionRefused: a value is invalid, or the source cannot be served.
    """
    force = changes.pop("force", False)
    with all_tenants_scope(BypassReason.OPERATOR):
        row = Deployment.objects.filter(name=name).first()
    if force or row is None or row.engine != MILLRACE:
        return
    concerned = any(option in changes and changes[option] != getattr(row, option) for option in SOURCE_OPTIONS)
    for option, value in changes.items():
        setattr(row, option, value)
    if concerned:
        _check(row)
        check_source(row.spec)


def check_new_sources(entries: Iterable[dict[str, Any]]) -> None:
    """Check the sources of a file's deployments that do not exist yet. See `check_new_source`.

    Raises:
        ActionRefused: names the deployment.
    """
    with all_tenants_scope(BypassReason.OPERATOR):
        known = set(Deployment.objects.values_list("name", flat=True))
    for entry in entries:
        if entry["name"] in known:
            entry.pop("force", None)
            continue
        try:
            check_new_source(entry)
        except ActionRefused as exc:
            raise ActionRefused(
                Text("Deployment %(name)s: %(error)s", name=repr(entry["name"]), error=text_of(exc))
            ) from exc


def check_workers(row: Deployment, board: FleetStatus | None) -> str:
    """Check the options of the deployment's engine against what the running workers of its pools can compute with.

    Args:
        board: None if Valkey cannot be reached.

    Returns:
        Why the check was left out; empty if it was not.

    Raises:
        FieldRefused: with the text of the worker that refuses an option. A pool with a number of replicas needs one
            worker that does not.
    """
    if row.engine != MILLRACE or (row.dtype, row.kv_cache_dtype) == ("auto", "auto"):
        return ""
    if board is None:
        return Text("The options were not checked against workers, because Valkey cannot be reached.")
    try:
        has_kv_cache = model_task(row.source) == GENERATE
    except (ModelError, OSError, RuntimeError):  # its workers find the source, not this machine
        has_kv_cache = True
    unknown = []
    for pool, replicas in sorted(row.pools.items()):
        found = [
            find_refusal(
                worker.support,
                row.dtype,  # type: ignore[arg-type]
                row.kv_cache_dtype if has_kv_cache else "auto",  # type: ignore[arg-type]
            )
            for worker in board.workers
            if pool in worker.pools
        ]
        refusals = [refusal for refusal in found if refusal is not None]
        if not found:
            unknown.append(pool)
        elif refusals and (replicas == ALL_WORKERS or len(refusals) == len(found)):
            raise FieldRefused(refusals[0].option, "invalid", refusals[0].message)
    if not unknown:
        return ""
    return Text(
        "The options were not checked against workers: no worker of the pool %(unknown)s is running.",
        unknown=", ".join(unknown),
    )


def check_public(row: Deployment) -> None:
    """Check that the base URL of an upstream does not resolve to internal addresses, unless the deployment allows it.

    Call it outside of transactions: it can wait for a name server. Workers check the address of each connection again.

    Raises:
        FieldRefused: the host is internal.
    """
    if row.engine in (MILLRACE, UpstreamEngine.MANAGED) or row.allow_internal:
        return
    try:
        check_url(row.source, ())
    except TargetRefused as exc:
        raise _base_url_refused(exc) from exc


def deployment_task(row: Deployment) -> str:
    """Return the model's task: generate, embed or rerank."""
    return row.task if row.engine != MILLRACE else model_task(row.source)


def unpriced_names(names: Iterable[str]) -> set[str]:
    """Return the deployments without a list price. Their requests are rejected. Inside `all_tenants_scope(…)`."""
    wanted = set(names)
    rows = CompiledRateCard.objects.filter(tenant_id=None, model__in=wanted, effective_from__lte=datetime.now(UTC))
    return wanted - set(rows.values_list("model", flat=True))


def has_price(name: str) -> bool:
    """Return whether the deployment has a list price."""
    with all_tenants_scope(BypassReason.OPERATOR):
        return not unpriced_names([name])


def offered_price(deployment: Deployment) -> Proposal:
    """Return prices to start from: those of a deployment with the same source, else those of the embedded models.

    Inside `all_tenants_scope(…)`.
    """
    similar = (
        Deployment.objects.filter(source=deployment.source, upstream_model=deployment.upstream_model)
        .exclude(pk=deployment.pk)
        .values_list("name", flat=True)
    )
    for name in similar:
        if prices := _list_prices(name):
            return Proposal(tuple(msgspec.structs.replace(price, model=deployment.name) for price in prices))
    if deployment_task(deployment) == "generate":
        return demo_prices.proposal([deployment.name])
    return demo_prices.proposal([], [deployment.name])


def do_draft_offered_price(name: str, *, by: User | None) -> PriceVersion:
    """Draft the offered price of a deployment, for another operator to publish.

    Raises:
        Conflict: it does not exist, or it has a price.
    """
    with all_tenants_scope(BypassReason.OPERATOR):
        row = _lock_deployment(name)
        if not unpriced_names([name]):
            raise Conflict(
                Text("The deployment %(name)s has a price already. Change it in the price book.", name=repr(name))
            )
        return do_propose_prices(offered_price(row), note=f"Offered price of {name}", created_by=by)


def _list_prices(model: str) -> list[NewPrice]:
    rows = CompiledRateCard.objects.filter(tenant_id=None, model=model, effective_from__lte=datetime.now(UTC))
    newest = rows.order_by("tier", "-effective_from", "-pk").distinct("tier")
    return [
        NewPrice(
            model,
            row.decode().tier,
            rate.component,
            rate.nano_per_million,
            *ranges_of(rate),
        )
        for row in newest
        for rate in row.decode().rates
    ]


def _options_of(spec: ModelSpec) -> dict[str, Any]:
    """Return the options that MILLRACE_MODELS defines."""
    names = ("source", "dtype", "max_model_len", "tool_parser", "reasoning_parser", "revision", "quantization")
    return {
        name: getattr(spec, name) for name in (*names, "speculation", "kv_cache_dtype", "draft_model", "control_tokens")
    }


def _check(row: Deployment) -> None:
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
    try:
        preset = preset_of(UpstreamSpec(UpstreamEngine(row.engine), row.source, row.upstream_model, preset=row.preset))
    except ValueError as exc:
        raise FieldRefused("preset", "invalid", Text("%(error)s.", error=text_of(exc))) from exc
    if row.engine == UpstreamEngine.MANAGED:
        return
    row.source = (row.source or preset.base_url).rstrip("/")
    if not row.source:
        raise FieldRefused("base_url", "invalid", Text("Enter the base URL of the upstream, such as https://host/v1."))
    parts = urlsplit(row.source)
    if parts.query or parts.scheme not in ("https", "http"):
        raise FieldRefused("base_url", "invalid", Text("Enter an http:// or https:// URL without a query."))
    try:
        parse(row.source, (parts.hostname or "",) if row.allow_internal else ())
    except (TargetRefused, ValueError) as exc:
        raise _base_url_refused(exc) from exc


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


def _base_url_refused(exc: ValueError) -> FieldRefused:
    reason = exc.reason if isinstance(exc, TargetRefused) else str(exc)  # without the advice for webhooks
    message = Text(
        "%(reason)s Use an https:// URL with a public address, or allow internal addresses for this deployment.",
        reason=reason,
    )
    return FieldRefused("base_url", "base_url_refused", message)


def _check_secret(row: Deployment, secret: str | None) -> None:
    """Check a secret that is stored with a new deployment.

    Raises:
        FieldRefused: the deployment needs no secret, or it is not valid.
    """
    if secret is None:
        return
    if row.engine == MILLRACE or row.credential_id is not None:
        raise FieldRefused("secret", "invalid", Text("Send a secret only for an upstream, and without a credential."))
    check_secret(secret)


def _check_credential(row: Deployment) -> None:
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


def _lock_deployment(name: str) -> Deployment:
    """Lock the catalog and return a deployment.

    Raises:
        Conflict: it does not exist.
    """
    _lock()
    row = Deployment.objects.filter(name=name).first()
    if row is None:
        raise Conflict(Text("The deployment %(name)s does not exist.", name=repr(name)))
    return row


def _publish() -> None:
    try:
        copy_deployments()
    except redis.RedisError as exc:
        log.warning("deployment_sync_failed", error=str(exc))


def _lock() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
