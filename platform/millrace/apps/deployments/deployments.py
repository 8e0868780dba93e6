"""Changes of the catalog of deployments.

PostgreSQL contains the deployments, and changes are in the audit log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

import msgspec
from django.conf import settings
from django.db import transaction

from inference_worker.contract.deployments import ALL_WORKERS, MAX_DEPLOYMENTS, WantedState
from inference_worker.contract.settings import ModelSpec
from inference_worker.contract.texts import Text, text_of
from millrace.apps.deployments.catalog_copy import publish_copy
from millrace.apps.deployments.catalog_lock import lock_catalog, lock_deployment
from millrace.apps.deployments.deployment_checks import DEFAULT_POOLS, check_workers, read_board
from millrace.apps.deployments.models import Deployment, RemovedDeployment
from millrace.apps.deployments.value_checks import check_credential, check_new_secret, check_values
from tenants import audit
from tenants.actions import ActionRefused, Conflict
from tenants.actions.credentials import do_create_credential
from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope

OPTIONS = tuple(name for name in Deployment.AUDITED if name not in ("name", "source", "state"))
WORKER_OPTIONS = ("dtype", "kv_cache_dtype", "pools")  # options whose possible values depend on the workers


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
    check_values(row)
    check_new_secret(row, secret)
    if row.imported is None:  # the models of the settings are served, or refused by their worker
        check_workers(row, read_board())
    with all_tenants_scope(BypassReason.OPERATOR):
        lock_catalog()
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
        check_credential(row)
        row.save(force_insert=True)
        audit.record("deployment.created", row, tenant_id=None, after=audit.serialize_for_audit(row))
        transaction.on_commit(publish_copy)
    return row


def do_update_deployment(name: str, *, checks_workers: bool = True, **changes: Any) -> Deployment:
    """Change options of a deployment. A change of what replicas load is a new version, which replaces the old one.

    Args:
        checks_workers: refuse options that no worker of the pools supports.

    Raises:
        Conflict: it does not exist. ActionRefused: a value is invalid.
    """
    with all_tenants_scope(BypassReason.OPERATOR):
        row = lock_deployment(name)
        before = audit.serialize_for_audit(row)
        for option, value in changes.items():
            setattr(row, option, value)
        check_values(row)
        if checks_workers and any(before[option] != getattr(row, option) for option in WORKER_OPTIONS):
            check_workers(row, read_board())
        check_credential(row)
        after = audit.serialize_for_audit(row)
        if before != after:
            row.save()
            audit.record("deployment.updated", row, tenant_id=None, before=before, after=after)
            transaction.on_commit(publish_copy)
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
        row = lock_deployment(name)
        if row.imported is not None:
            RemovedDeployment.objects.create(name=name, imported=row.imported)
        _remove(row)


def _remove(row: Deployment) -> None:
    audit.record("deployment.removed", row, tenant_id=None, before=audit.serialize_for_audit(row))
    row.delete()
    transaction.on_commit(publish_copy)


def do_import_deployments(entries: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Create or update the deployments of a file, in one transaction. Others stay as they are. Idempotent.

    Returns:
        The names of the created, updated and unchanged deployments.

    Raises:
        ActionRefused: an entry is invalid; nothing is changed.
    """
    result: dict[str, list[str]] = {"created": [], "updated": [], "unchanged": []}
    with all_tenants_scope(BypassReason.OPERATOR):
        lock_catalog()
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
        lock_catalog()
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
        transaction.on_commit(publish_copy)


def _options_of(spec: ModelSpec) -> dict[str, Any]:
    """Return the options that MILLRACE_MODELS defines."""
    names = ("source", "dtype", "max_model_len", "tool_parser", "reasoning_parser", "revision", "quantization")
    return {
        name: getattr(spec, name) for name in (*names, "speculation", "kv_cache_dtype", "draft_model", "control_tokens")
    }
