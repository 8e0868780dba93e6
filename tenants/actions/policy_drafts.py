"""Actions on drafts of routing policies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from inference_worker.contract.texts import Text
from tenants import audit
from tenants.actions.common import ActionRefused, Conflict, check, locked_tenant, refuse_problems
from tenants.actions.rules import active_version, check_base, check_policy, publish_version
from tenants.models import RoutingPolicy, RoutingPolicyDraft, Tenant, User
from tenants.routing_policies.target_checks import TargetChecks

MAX_BODY_LENGTH = 64 * 1024  # characters of a draft as JSON
MAX_DRAFTS = 200  # per tenant


def do_save_policy_draft(
    tenant: Tenant,
    name: str,
    body: Mapping[str, Any],
    *,
    updated_by: User | None = None,
    base_version: int | None = None,
) -> RoutingPolicyDraft:
    """Save the draft of the policy of the model name `name`. It need not be valid.

    Args:
        base_version: the version that the draft is based on; 0: none. None: as before; of a new draft the active one.

    Raises:
        ActionRefused: the draft is too long, or there are too many.
    """
    if len(json.dumps(body)) > MAX_BODY_LENGTH:
        raise ActionRefused(
            Text("body: a policy may have at most %(max_length)s characters.", max_length=MAX_BODY_LENGTH)
        )
    with locked_tenant(tenant) as locked:
        drafts = RoutingPolicyDraft.objects.for_tenant(locked)
        row = drafts.filter(name=name).first()
        before = None if row is None else audit.serialize_for_audit(row)
        if row is None:
            if drafts.count() >= MAX_DRAFTS:
                raise ActionRefused(
                    Text("There are %(max_drafts)s drafts. Publish or discard one first.", max_drafts=MAX_DRAFTS)
                )
            row = RoutingPolicyDraft(tenant=locked, name=name, based_on=active_version(locked, name))
        if base_version is not None:
            row.based_on = base_version or None
        row.body, row.updated_by = dict(body), updated_by
        check(row)
        row.save()
        after = audit.serialize_for_audit(row)
        action = "policy_draft.created" if before is None else "policy_draft.updated"
        audit.record(action, row, tenant_id=locked.pk, before=before, after=after)
    return row


def do_discard_policy_draft(draft: RoutingPolicyDraft) -> bool:
    """Discard the draft. Returns False if it is already discarded or published."""
    with locked_tenant(draft.tenant_id) as tenant:
        row = RoutingPolicyDraft.objects.for_tenant(tenant).filter(pk=draft.pk).first()
        if row is None:
            return False
        _delete(tenant, row)
    return True


def do_publish_policy_draft(draft: RoutingPolicyDraft, *, created_by: User | None = None) -> RoutingPolicy:
    """Publish the draft as a new version of its policy, and delete the draft.

    Raises:
        ActionRefused: the draft is not a valid policy, or a model in it cannot serve the tenant's requests.
        Conflict: it was published, discarded or changed.
        VersionConflict: another version was published since it was created.
    """
    with locked_tenant(draft.tenant_id) as tenant:
        row = RoutingPolicyDraft.objects.for_tenant(tenant).filter(pk=draft.pk).first()
        if row is None:
            raise Conflict(Text("This draft does not exist any more."))
        if row.updated_at != draft.updated_at:
            raise Conflict(Text("The draft has changed meanwhile. Read it again."))
        check_base(tenant, row.name, row.based_on or 0)
        check_policy(row.body)
        refuse_problems("body", TargetChecks(tenant.pk).of_policy(row.body))
        made = publish_version(tenant, "policy.published", row.name, row.body, created_by)
        _delete(tenant, row)
    return made


def _delete(tenant: Tenant, row: RoutingPolicyDraft) -> None:
    audit.record("policy_draft.deleted", row, tenant_id=tenant.pk, before=audit.serialize_for_audit(row))
    row.delete()
