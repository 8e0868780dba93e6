"""The audit log: who changed what, with what it was before and is now. Every verb in `tenants.actions` writes here.

Who acts is known to the request (or the command), not to the verbs: it is kept beside them, for the time of `acting`.
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
    """Who acts, and from where. Without a person or key it is the platform itself."""

    name: str = "platform"
    user_id: int | None = None
    key_id: int | None = None
    address: str | None = None
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
def acting(actor: Actor) -> Iterator[None]:
    """Record changes inside the context as this actor's."""
    token = _actor.set(actor)
    try:
        yield
    finally:
        _actor.reset(token)


def become(actor: Actor) -> None:
    """Set the actor until the enclosing `acting` ends."""
    _actor.set(actor)


def described(row: models.Model) -> dict[str, Any]:
    """Return what the log shows of a row: its model's `AUDITED` fields, as JSON can hold them."""
    values = {name: getattr(row, name) for name in row.AUDITED}  # type: ignore[attr-defined]
    encoder = DjangoJSONEncoder()
    return {name: value if _is_json(value) else encoder.default(value) for name, value in values.items()}


def record(
    verb: str,
    row: models.Model,
    *,
    tenant_id: int | None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Write down a change of `row`, in the transaction that makes it. Without `before` it is new, without `after` gone.

    Of an update only the fields that changed are kept.
    """
    if before is not None and after is not None:
        changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
        before = {name: value for name, value in before.items() if name in changed}
        after = {name: value for name, value in after.items() if name in changed}
    actor = current_actor()
    AuditEntry(
        tenant_id=tenant_id,
        verb=verb,
        actor_user_id=actor.user_id,
        actor_key_id=actor.key_id,
        actor=actor.name[:254],
        address=actor.address,
        request_id=actor.request_id,
        object_type=row._meta.model_name or "",
        object_id=row.pk,
        object_name=str(row)[:254],
        before=before,
        after=after,
    ).save(force_insert=True)


def record_person(
    verb: str, user: User, *, before: Mapping[str, Any] | None = None, after: Mapping[str, Any] | None = None
) -> None:
    """Write down what became of a person's login, which concerns no tenant: operators see it, tenants do not."""
    with all_tenants_scope(BypassReason.PERSON):
        record(verb, user, tenant_id=None, before=before, after=after)


def _is_json(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | bool | list | dict)
