"""Actions on the views that a user has saved. They change only what this user sees, so they write no audit entry."""

from __future__ import annotations

from inference_worker.contract.texts import Text
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
        raise ActionRefused(Text("Enter a name of 1 to %(max_length)s characters.", max_length=MAX_VIEW_NAME))
    if len(query) > MAX_VIEW_QUERY:
        raise ActionRefused(Text("These filters are too long to be saved. Remove some of them."))
    with locked_tenant(tenant) as locked:
        own = SavedView.objects.for_tenant(locked).filter(user=user, screen=screen)
        if not own.filter(name=name).exists() and own.count() >= MAX_VIEWS:
            raise Conflict(Text("You have %(max_views)s views here. Delete one first.", max_views=MAX_VIEWS))
        row, _ = own.update_or_create(tenant=locked, user=user, screen=screen, name=name, defaults={"query": query})
    saved: SavedView = row
    return saved


def do_delete_view(tenant: Tenant, user: User, pk: int) -> bool:
    """Delete a view of the user. Returns False if there is none with this ID."""
    with locked_tenant(tenant) as locked:
        deleted, _ = SavedView.objects.for_tenant(locked).filter(user=user, pk=pk).delete()
    return bool(deleted)
