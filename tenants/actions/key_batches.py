"""Changes of several API keys in one transaction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tenants.actions.common import ActionRefused, locked_tenant
from tenants.actions.keys import do_update_api_key
from tenants.actions.rules import do_set_limits
from tenants.models import LIMITS, ApiKey, LimitSet, Tenant


def do_update_api_keys(tenant: Tenant, keys: Sequence[ApiKey], limits: Mapping[str, int], **fields: Any) -> int:
    """Change several active keys. If one of them cannot be changed, none is. Returns their number.

    Args:
        limits: rate limits of each key for all models. Other limits of the keys stay.
        fields: as of `do_update_api_key`.

    Raises:
        ActionRefused: a key is revoked or expired, or a value is not valid. The text names the key.
    """
    with locked_tenant(tenant) as locked:
        for key in keys:
            try:
                if fields:
                    do_update_api_key(key, **fields)
                if limits:
                    do_set_limits(locked, _limits_of(locked, key) | dict(limits), key=key)
            except ActionRefused as exc:
                raise ActionRefused(f"{key.name}: {exc}") from exc
    return len(keys)


def _limits_of(tenant: Tenant, key: ApiKey) -> dict[str, int | None]:
    """Return the key's own limits for all models."""
    rows = LimitSet.objects.for_tenant(tenant).filter(key=key, model="", set_by_operator=False, dry_run=False)
    row = rows.first()
    return {} if row is None else {name: getattr(row, name) for name in LIMITS}
