"""Whose a budget or a set of limits is: the account's, a project's, a key's or a member's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from billing.models import Budget
from frontend.core.page_context import PageContext
from millrace.apps.request_log.dry_runs import DryRunScope
from tenants.models import ApiKey, LimitSet, Membership, Project, User

MOST_CHOICES = 200  # of each kind, in a form
ACCOUNT = "account"


@dataclass(frozen=True)
class BudgetOwnerScope:
    """One owner of limits, as forms name it: "account", "project:3", "key:5", "member:7"."""

    kind: str
    row: Any = None

    @property
    def value(self) -> str:
        return f"{self.kind}:{self.row.pk}" if self.row is not None else ACCOUNT

    @property
    def label(self) -> str:
        if self.row is None:
            return "The organization"
        if isinstance(self.row, User):
            return f"Keys created by {person(self.row)}"
        return f"{self.kind.capitalize()} {self.row.name}"

    @property
    def named(self) -> dict[str, Any]:
        """As the verbs take it."""
        return {} if self.row is None else {self.kind: self.row}

    def scope(self, tenant_id: int, model: str = "") -> DryRunScope:
        """Whose requests are tried."""
        ids = {} if self.row is None else {f"{self.kind}_id": self.row.pk}
        return DryRunScope(tenant_id, model=model or None, **ids)


def person(user: User) -> str:
    return user.name or user.email


def whose(row: Budget | LimitSet) -> BudgetOwnerScope:
    """Of a row with its project, key and member at hand."""
    for kind in ("project", "key", "member"):
        if (found := getattr(row, kind, None)) is not None:
            return BudgetOwnerScope(kind, found)
    return BudgetOwnerScope(ACCOUNT)


def choices(visit: PageContext, *, members: bool) -> dict[str, BudgetOwnerScope]:
    """Whom one can limit, by the value in the form. In the visit's scope."""
    found = [BudgetOwnerScope(ACCOUNT)]
    found += [
        BudgetOwnerScope("project", row)
        for row in Project.objects.for_tenant(visit.tenant).order_by("name")[:MOST_CHOICES]
    ]
    keys = ApiKey.objects.for_tenant(visit.tenant).filter(revoked_at=None).order_by("name", "pk")
    found += [BudgetOwnerScope("key", row) for row in keys[:MOST_CHOICES]]
    if members:
        rows = Membership.objects.for_tenant(visit.tenant).select_related("user").order_by("user__email")
        found += [BudgetOwnerScope("member", row.user) for row in rows[:MOST_CHOICES]]
    return {one.value: one for one in found}
