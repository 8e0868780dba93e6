"""Actions on the views that a user has saved. They change only what this user sees, so they write no audit entry."""

from __future__ import annotations

from tenants.actions.common import ActionRefused, Conflict, locked_tenant
from tenants.models import SavedView, Tenant, User
from tenants.models.views import MAX_VIEW_NAME, MAX_VIEW_QUERY, MAX_VIEWS


def do_save_view(tenant: Tenant, user: User, screen: str, name: str, query: str) -> SavedView:
    """Save the filters of a list. A view with the same name is replaced.

    Raises:
        ActionRefused: the name is empty or too long, or the query is too long.
        Conflict: the user has too many views on this screen.
    """
    name = name.strip()
    if not 1 <= len(name) <= MAX_VIEW_NAME:
        raise ActionRefused(f"Enter a name of 1 to {MAX_VIEW_NAME} characters.")
    if len(query) > MAX_VIEW_QUERY:
        raise ActionRefused("These filters are too long to be saved. Remove some of them.")
    with locked_tenant(tenant) as locked:
        own = SavedView.objects.for_tenant(locked).filter(user=user, screen=screen)
        if not own.filter(name=name).exists() and own.count() >= MAX_VIEWS:
            raise Conflict(f"You have {MAX_VIEWS} views here. Delete one first.")
        row, _ = own.update_or_create(tenant=locked, user=user, screen=screen, name=name, defaults={"query": query})
    saved: SavedView = row
    return saved


def do_delete_view(tenant: Tenant, user: User, pk: int) -> bool:
    """Delete a view of the user. Returns False if there is none with this ID."""
    with locked_tenant(tenant) as locked:
        deleted, _ = SavedView.objects.for_tenant(locked).filter(user=user, pk=pk).delete()
    return bool(deleted)
