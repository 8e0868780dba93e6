"""Views of lists that users have saved in the console."""

from __future__ import annotations

from typing import ClassVar

from django.db import models

from tenants.isolation.scopes import TenantManager
from tenants.models.people import User
from tenants.models.tenancy import Tenant

MAX_VIEWS = 12  # per user on one screen of a tenant
MAX_VIEW_NAME = 40
MAX_VIEW_QUERY = 1000


class SavedView(models.Model):
    """The filters and columns of a list under a name. Only its user sees it."""

    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE)
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="+")
    screen = models.CharField(max_length=40, help_text="name of the screen's URL")
    name = models.CharField(max_length=MAX_VIEW_NAME)
    query = models.CharField(max_length=MAX_VIEW_QUERY, blank=True, help_text="query string without the question mark")
    created_at = models.DateTimeField(auto_now_add=True)

    objects = TenantManager()

    class Meta:
        ordering: ClassVar[list[str]] = ["id"]
        constraints: ClassVar[list[models.BaseConstraint]] = [
            models.UniqueConstraint(fields=["tenant", "user", "screen", "name"], name="saved_view_unique"),
            models.CheckConstraint(condition=~models.Q(name=""), name="saved_view_named"),
        ]

    def __str__(self) -> str:
        return f"{self.screen}: {self.name}"
