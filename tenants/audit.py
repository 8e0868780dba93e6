"""The audit log: the actor, the action, the object, and its values before and after. Every action writes it.

The current actor is stored in a context variable for the duration of the request or command (`actor_context`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db import models

from tenants.isolation.db_roles import BypassReason
from tenants.isolation.scopes import all_tenants_scope
from tenants.models import AuditEntry

if TYPE_CHECKING:
    from tenants.models import ApiKey, User


@dataclass(frozen=True)
class Actor:
    """The user or key that acts, and the client's IP address. Without a user or key, the platform acts."""

    name: str = "platform"
    user_id: int | None = None
    key_id: int | None = None
    ip_address: str | None = None
    request_id: str = ""

    def as_user(self, user: User) -> Actor:
        return replace(self, name=user.email, user_id=user.pk, key_id=None)

    def as_key(self, key: ApiKey) -> Actor:
        return replace(self, name=f"key {key.prefix}…", user_id=None, key_id=key.pk)


PLATFORM = Actor()
_actor: ContextVar[Actor] = ContextVar("actor", default=PLATFORM)


def current_actor() -> Actor:
    return _actor.get()


@contextmanager
def actor_context(actor: Actor) -> Iterator[None]:
    """Record changes inside the context as this actor's."""
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)


def set_actor(actor: Actor) -> None:
    """Set the actor until the enclosing `actor_context` ends."""
    _actor.set(actor)


def serialize_for_audit(row: models.Model) -> dict[str, Any]:
    """Return the row's `AUDITED` fields as JSON values for the audit log."""
    values = {name: getattr(row, name) for name in row.AUDITED}  # type: ignore[attr-defined]
    encoder = DjangoJSONEncoder()
    return {name: value if _is_json(value) else encoder.default(value) for name, value in values.items()}


def record(
    action: str,
    row: models.Model,
    *,
    tenant_id: int | None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Write an entry about `row` in the transaction that changes it.

    A creation has no `before`, a deletion no `after`. An entry of an update contains only the changed fields.
    """
    if before is not None and after is not None:
        changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
        before = {name: value for name, value in before.items() if name in changed}
        after = {name: value for name, value in after.items() if name in changed}
    actor = current_actor()
    AuditEntry(
        tenant_id=tenant_id,
        action=action,
        actor_user_id=actor.user_id,
        actor_key_id=actor.key_id,
        actor=actor.name[:254],
        ip_address=actor.ip_address,
        request_id=actor.request_id,
        object_type=row._meta.model_name or "",
        object_id=row.pk,
        object_name=str(row)[:254],
        before=before,
        after=after,
    ).save(force_insert=True)


def record_person(
    action: str, user: User, *, before: Mapping[str, Any] | None = None, after: Mapping[str, Any] | None = None
) -> None:
    """Write an entry about a user's login. It belongs to no tenant, so only operators see it."""
    with all_tenants_scope(BypassReason.PERSON):
        record(action, user, tenant_id=None, before=before, after=after)


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | dict)
