"""Every change of who may do what. Each verb is atomic, assumes it runs concurrently with itself, and compiles the
snapshots it changes in the same transaction; the copy the gateways share is replaced once it has committed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial

import redis
import structlog
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from millrace.config import platform_settings
from tenants import snapshot
from tenants.models import ApiKey, KeySnapshot, Membership, Project, Tenant, User

log = structlog.get_logger(__name__)

# KEYS: the copy. ARGV: the new one, its version, and how many seconds it lives.
_REPLACE_OLDER = """
local held = redis.call('GET', KEYS[1])
if held and cmsgpack.unpack(held)['version'] > tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[3])
return 1
"""


class ActionRefused(Exception):
    """The change cannot be made; the message says why, for the person who asked."""


@transaction.atomic
def do_create_tenant(slug: str, name: str, *, owner: User | None = None, is_demo: bool = False) -> Tenant:
    """A tenant with its first project, `default`.

    Raises:
        ActionRefused: the slug is taken, or no slug.
    """
    tenant = Tenant(slug=slug, name=name, is_demo=is_demo)
    _insert(tenant, f"There is a tenant {slug!r} already.")
    do_create_project(tenant, "default", "Default")
    if owner is not None:
        do_add_member(tenant, owner, Membership.Role.OWNER)
    return tenant


@transaction.atomic
def do_create_project(tenant: Tenant, slug: str, name: str) -> Project:
    """A project of the tenant.

    Raises:
        ActionRefused: the slug is taken, or no slug.
    """
    project = Project(tenant=tenant, slug=slug, name=name)
    _insert(project, f"There is a project {slug!r} already.")
    return project


@transaction.atomic
def do_add_member(tenant: Tenant, user: User, role: str) -> Membership:
    """Make the user a member, or change the role of one.

    Raises:
        ActionRefused: there is no such role.
    """
    if role not in Membership.Role.values:
        raise ActionRefused(f"Unknown role {role!r}; known are {', '.join(Membership.Role.values)}.")
    membership, _ = Membership.objects.for_tenant(tenant).update_or_create(
        user=user, defaults={"role": role}, create_defaults={"tenant": tenant, "role": role}
    )
    return membership


@transaction.atomic
def do_create_api_key(
    project: Project,
    name: str,
    *,
    scopes: Sequence[str] = ("inference", "models"),
    allowed_models: Sequence[str] | None = None,
    expires_at: datetime | None = None,
    created_by: User | None = None,
) -> tuple[ApiKey, str]:
    """A new key and its secret, which cannot be had again.

    Raises:
        ActionRefused: an unknown scope, or an expiry in the past.
    """
    if unknown := sorted(set(scopes) - set(snapshot.SCOPES)):
        raise ActionRefused(f"Unknown scope {', '.join(unknown)}; known are {', '.join(snapshot.SCOPES)}.")
    if expires_at is not None and expires_at <= datetime.now(UTC):
        raise ActionRefused("The expiry lies in the past.")
    # NOTE: whoever suspends the tenant waits for this key, or this key sees it suspended: no key slips between.
    Tenant.objects.select_for_update(no_key=True).get(pk=project.tenant_id)
    secret = snapshot.new_secret()
    key = ApiKey.objects.create(
        tenant_id=project.tenant_id,
        project=project,
        name=name,
        prefix=snapshot.visible_prefix(secret),
        key_hash=snapshot.hash_key(secret),
        scopes=list(scopes),
        allowed_models=None if allowed_models is None else list(allowed_models),
        expires_at=expires_at,
        created_by=created_by,
    )
    _compile([key.pk])
    return key, secret


@transaction.atomic
def do_revoke_api_key(key: ApiKey) -> bool:
    """Revoke the key for good. False if it was revoked before."""
    changed = (
        ApiKey.objects.for_tenant(key.tenant_id)
        .filter(pk=key.pk, revoked_at__isnull=True)
        .update(revoked_at=datetime.now(UTC))
    )
    if changed:
        _compile([key.pk])
    return bool(changed)


@transaction.atomic
def do_suspend_tenant(tenant: Tenant) -> bool:
    """Stop serving the tenant. False if that was so before."""
    return _set_status(tenant, Tenant.Status.ACTIVE, Tenant.Status.SUSPENDED)


@transaction.atomic
def do_resume_tenant(tenant: Tenant) -> bool:
    """Serve a suspended tenant again. False if it was not suspended."""
    return _set_status(tenant, Tenant.Status.SUSPENDED, Tenant.Status.ACTIVE)


def _insert(row: Tenant | Project, taken: str) -> None:
    """Save a new row, if its values are right and nobody, even at this instant, has taken its slug."""
    try:
        row.clean_fields()
        with transaction.atomic():
            row.save(force_insert=True)
    except ValidationError as fault:
        texts = (f"{name}: {' '.join(messages)}" for name, messages in fault.message_dict.items())
        raise ActionRefused(" ".join(texts)) from fault
    except IntegrityError as fault:
        raise ActionRefused(taken) from fault


def _set_status(tenant: Tenant, old: str, new: str) -> bool:
    changed = Tenant.objects.filter(pk=tenant.pk, status=old).update(status=new)
    if changed:
        _compile(ApiKey.objects.for_tenant(tenant).values_list("pk", flat=True))
    return bool(changed)


def _compile(key_ids: Iterable[int]) -> None:
    """Write the keys' snapshots anew. The keys' rows are locked in order, so that of two changes at once the later
    one sees what the earlier wrote, and no two wait for each other in a circle."""
    keys = ApiKey.objects.all_tenants("compiled by id, whosever they are").filter(pk__in=list(key_ids))
    for key in keys.select_for_update(of=("self",)).select_related("tenant").order_by("pk"):
        key_hash = bytes(key.key_hash)
        old = KeySnapshot.objects.filter(key=key).values_list("version", flat=True).first() or 0
        compiled = _snapshot(key, old + 1)
        KeySnapshot.objects.update_or_create(
            key_hash=key_hash,
            defaults={"key": key, "version": compiled.version, "payload": snapshot.encode(compiled)},
        )
        transaction.on_commit(partial(tell_gateways, key_hash, compiled))


def _snapshot(key: ApiKey, version: int) -> snapshot.KeySnapshot:
    return snapshot.KeySnapshot(
        key_id=key.pk,
        tenant_id=key.tenant_id,
        project_id=key.project_id,
        tenant_slug=key.tenant.slug,
        scopes=tuple(key.scopes),
        models=None if key.allowed_models is None else tuple(key.allowed_models),
        expires_at=None if key.expires_at is None else round(key.expires_at.timestamp() * 1e6),
        revoked=key.revoked_at is not None,
        suspended=key.tenant.is_suspended,
        limits=snapshot.Limits(),
        version=version,
    )


def tell_gateways(key_hash: bytes, compiled: snapshot.KeySnapshot) -> None:
    """Replace the copy the gateways share, unless it is newer: messages of two changes may overtake each other.

    Replaced and not deleted: a gateway that read the old row a moment ago writes its copy only where there is none. If
    the broker cannot be told, copies end by themselves within a minute.
    """
    name, payload = snapshot.valkey_name(key_hash), snapshot.encode(compiled)
    try:
        with redis.Redis.from_url(platform_settings().broker_url, socket_timeout=2) as broker:
            broker.eval(_REPLACE_OLDER, 1, name, payload, compiled.version, snapshot.VALKEY_SECONDS)
    except redis.RedisError as fault:
        log.warning("gateways_not_told", error=str(fault))
