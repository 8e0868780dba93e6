"""Actions on rate limits and routing policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.models import Max

from inference_worker.contract.texts import Text, text_of
from tenants import audit
from tenants.actions.common import ActionRefused, Conflict, VersionConflict, check, locked_tenant, refuse_problems
from tenants.keys.key_snapshots import rebuild_key_snapshots
from tenants.models import LIMITS, ApiKey, ChangeEventRow, LimitSet, Project, RoutingPolicy, Tenant, User
from tenants.notifications.events import notify_published
from tenants.routing_policies import policy
from tenants.routing_policies.target_checks import TargetChecks


def do_set_limits(
    tenant: Tenant,
    limits: Mapping[str, int | None],
    *,
    project: Project | None = None,
    key: ApiKey | None = None,
    model: str = "",
    set_by_operator: bool = False,
    dry_run: bool = False,
) -> LimitSet:
    """Set the limits of a tenant, a project or a key, for one model or all models. Omitted limits are removed.

    Raises:
        ActionRefused: a limit is unknown or negative, there is no limit, or both a project and a key are given.
    """
    if unknown := sorted(set(limits) - set(LIMITS)):
        raise ActionRefused(
            Text(
                "Unknown limit %(unknown)s; known are %(limits)s.", unknown=", ".join(unknown), limits=", ".join(LIMITS)
            )
        )
    if all(value is None for value in limits.values()):
        raise ActionRefused(Text("Enter at least one limit."))
    if any(value is not None and value < 0 for value in limits.values()):
        raise ActionRefused(Text("A limit must not be negative."))
    if project is not None and key is not None:
        raise ActionRefused(Text("Choose a project or a key, not both."))
    with locked_tenant(tenant) as locked:
        _check_owner(locked, project, key)
        scope = {"project": project, "key": key, "model": model, "set_by_operator": set_by_operator, "dry_run": dry_run}
        row = LimitSet.objects.for_tenant(locked).filter(**_where(scope)).first()
        before = None if row is None else audit.serialize_for_audit(row)
        row = row or LimitSet(tenant=locked, **scope)
        for name in LIMITS:
            setattr(row, name, limits.get(name))
        check(row)
        row.save()
        audit.record("limits.updated", row, tenant_id=locked.pk, before=before, after=audit.serialize_for_audit(row))
        rebuild_key_snapshots(locked, ChangeEventRow.ChangeType.LIMITS, key)
    return row


def do_remove_limits(limits: LimitSet) -> bool:
    """Remove the limits. Returns False if they are already removed."""
    with locked_tenant(limits.tenant_id) as tenant:
        row = LimitSet.objects.for_tenant(tenant).select_related("key").filter(pk=limits.pk).first()
        if row is None:
            return False
        audit.record("limits.deleted", row, tenant_id=tenant.pk, before=audit.serialize_for_audit(row))
        key = row.key
        row.delete()
        rebuild_key_snapshots(tenant, ChangeEventRow.ChangeType.LIMITS, key)
    return True


def do_publish_policy(
    tenant: Tenant,
    name: str,
    body: Mapping[str, Any],
    *,
    created_by: User | None = None,
    base_version: int | None = None,
    check_targets: bool = True,
) -> RoutingPolicy:
    """Publish a new version of the policy of the model name `name`.

    Args:
        base_version: the active version that the change is based on; 0: none. None: it is not checked.
        check_targets: False while the platform is set up, before its deployments and prices exist.

    Raises:
        ActionRefused: the body is not a valid policy, or a model in it cannot serve the tenant's requests.
        VersionConflict: another version than `base_version` is active.
    """
    check_policy(body)
    with locked_tenant(tenant) as locked:
        if base_version is not None:
            check_base(locked, name, base_version)
        if check_targets:
            refuse_problems("body", TargetChecks(locked.pk).of_policy(body))
        return publish_version(locked, "policy.published", name, body, created_by)


def do_revert_policy(policy_version: RoutingPolicy, *, created_by: User | None = None) -> RoutingPolicy:
    """Publish the body of an earlier version as a new version.

    Raises:
        ActionRefused: a model in it cannot serve the tenant's requests any more.
    """
    with locked_tenant(policy_version.tenant_id) as tenant:
        old = RoutingPolicy.objects.for_tenant(tenant).filter(pk=policy_version.pk).first()
        if old is None:
            raise Conflict(Text("This version does not exist."))
        refuse_problems("body", TargetChecks(tenant.pk).of_policy(old.body))
        return publish_version(tenant, "policy.reverted", old.name, old.body, created_by)


def do_withdraw_policy(tenant: Tenant, name: str) -> bool:
    """Deactivate the policy of the name. Returns False if the name has no active policy."""
    with locked_tenant(tenant) as locked:
        row = RoutingPolicy.objects.for_tenant(locked).filter(name=name, active=True).first()
        if row is None:
            return False
        _deactivate(locked, row, "policy.withdrawn")
        rebuild_key_snapshots(locked, ChangeEventRow.ChangeType.POLICY)
    return True


def check_policy(body: Mapping[str, Any]) -> None:
    """Check the body of a policy.

    Raises:
        ActionRefused: it is not a valid policy.
    """
    try:
        policy.parse(body)
    except ValueError as exc:
        raise ActionRefused(Text("body: %(error)s", error=text_of(exc))) from exc


def check_base(tenant: Tenant, name: str, base_version: int) -> None:
    """Check that no other version than the base of a change is active. Must be called with the tenant locked.

    Raises:
        VersionConflict: another version is active.
    """
    active = active_version(tenant, name)
    if active is not None and active != base_version:
        raise VersionConflict(
            active, Text("Version %(active)s was published since. Compare your change with it.", active=str(active))
        )


def active_version(tenant: Tenant, name: str) -> int | None:
    """Return the active version of the policy of the name; None if there is none."""
    rows = RoutingPolicy.objects.for_tenant(tenant).filter(name=name, active=True)
    return rows.values_list("version", flat=True).first()


def publish_version(
    tenant: Tenant, action: str, name: str, body: Mapping[str, Any], created_by: User | None
) -> RoutingPolicy:
    """Publish a checked body as a new version. Must be called with the tenant locked."""
    rows = RoutingPolicy.objects.for_tenant(tenant).filter(name=name)
    latest = rows.order_by().aggregate(latest=Max("version"))["latest"] or 0
    row = RoutingPolicy(
        tenant=tenant, name=name, version=latest + 1, body=dict(body), active=True, created_by=created_by
    )
    check(row)
    if active := rows.filter(active=True).first():
        _deactivate(tenant, active, "policy.superseded")
    row.save(force_insert=True)
    audit.record(action, row, tenant_id=tenant.pk, after=audit.serialize_for_audit(row))
    rebuild_key_snapshots(tenant, ChangeEventRow.ChangeType.POLICY)
    notify_published(row)
    return row


def _deactivate(tenant: Tenant, row: RoutingPolicy, action: str) -> None:
    before = audit.serialize_for_audit(row)
    row.active = False
    row.save(update_fields=["active"])
    audit.record(action, row, tenant_id=tenant.pk, before=before, after=audit.serialize_for_audit(row))


def _check_owner(tenant: Tenant, project: Project | None, key: ApiKey | None) -> None:
    for row in (project, key):
        if row is not None and row.tenant_id != tenant.pk:
            raise ActionRefused(Text("%(row)s belongs to another tenant.", row=row))


def _where(scope: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name}__isnull" if value is None else name: True if value is None else value for name, value in scope.items()
    }
