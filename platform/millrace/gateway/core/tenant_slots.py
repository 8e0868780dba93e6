"""The share of a tenant in the slots of a gateway's background work, such as shadows and checks."""

from __future__ import annotations

from collections.abc import Iterable


def has_free_slot(tenant_id: int, slots: int, used_by: Iterable[int]) -> bool:
    """Return whether a tenant may use another slot, so that it leaves as many free as it uses.

    So a tenant uses at most half of the slots that the others leave, and a free slot remains for one that uses none.

    Args:
        used_by: the tenant of each slot in use.
    """
    tenants = list(used_by)
    return tenants.count(tenant_id) < slots - len(tenants)
