"""Owners of budgets and rate limits: the organization, a project, a key or a member."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext as _

from billing.models import Budget
from frontend.core.page_context import PageContext
from millrace.apps.policy_results.dry_runs import DryRunScope
from tenants.models import ApiKey, LimitSet, Membership, Project, User

MAX_CHOICES = 200  # choices per owner type
ACCOUNT = "account"


@dataclass(frozen=True)
class BudgetOwnerScope:
    """The owner of a limit. `value` is its name in forms: "account", "project:3", "key:5", "member:7"."""

    kind: str
    row: Any = None

    @property
    def value(self) -> str:
        return f"{self.kind}:{self.row.pk}" if self.row is not None else ACCOUNT

    @property
    def label(self) -> str:
        if self.row is None:
            return _("The organization")
        if isinstance(self.row, User):
            return _("Keys created by %(user_label)s") % {"user_label": user_label(self.row)}
        text = _("Key %(name)s") if self.kind == "key" else _("Project %(name)s")
        return text % {"name": self.row.name}

    @property
    def named(self) -> dict[str, Any]:
        """The owner as keyword argument of the budget actions."""
        return {} if self.row is None else {self.kind: self.row}

    def scope(self, tenant_id: int, model: str = "") -> DryRunScope:
        """Return the requests that a simulation reads."""
        ids = {} if self.row is None else {f"{self.kind}_id": self.row.pk}
        return DryRunScope(tenant_id, model=model or None, **ids)


def user_label(user: User) -> str:
    return user.name or user.email


def owner_of(row: Budget | LimitSet) -> BudgetOwnerScope:
    """Return the owner of a row whose project, key and member are loaded."""
    for kind in ("project", "key", "member"):
        if (found := getattr(row, kind, None)) is not None:
            return BudgetOwnerScope(kind, found)
    return BudgetOwnerScope(ACCOUNT)


def choices(ctx: PageContext, *, members: bool) -> dict[str, BudgetOwnerScope]:
    """Return the possible owners by their value in forms. Call inside `ctx.scope()`."""
    found = [BudgetOwnerScope(ACCOUNT)]
    found += [
        BudgetOwnerScope("project", row)
        for row in Project.objects.for_tenant(ctx.tenant).order_by("name")[:MAX_CHOICES]
    ]
    keys = ApiKey.objects.for_tenant(ctx.tenant).filter(revoked_at=None).order_by("name", "pk")
    found += [BudgetOwnerScope("key", row) for row in keys[:MAX_CHOICES]]
    if members:
        rows = Membership.objects.for_tenant(ctx.tenant).select_related("user").order_by("user__email")
        found += [BudgetOwnerScope("member", row.user) for row in rows[:MAX_CHOICES]]
    return {owner.value: owner for owner in found}
