"""The kinds of notifications: who sees each of them, and its default channels. Does not import Django.

A new kind is one entry here and a call of `notify` in the transaction of the change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inference_worker.contract.texts import Text

# The roles of API keys in the management API, by their scopes.
KEY_ROLES: Mapping[str, str] = {"manage": "admin", "billing": "billing"}


@dataclass(frozen=True)
class NotificationKind:
    """A kind of notifications. The console translates `label`."""

    name: str
    label: str
    roles: frozenset[str]  # the members who see it; empty: operators
    is_emailed: bool = False  # default for users who chose no channels for it

    @property
    def is_for_operators(self) -> bool:
        return not self.roles


_BILLING = frozenset({"owner", "admin", "billing"})
_TECHNICAL = frozenset({"owner", "admin", "developer"})
BUDGET_THRESHOLD = NotificationKind(
    "budget_threshold", Text("budget usage or forecast passed a threshold"), _BILLING, is_emailed=True
)
INVOICE_ISSUED = NotificationKind("invoice_issued", Text("invoice or credit note issued"), _BILLING)
INVOICE_PAST_DUE = NotificationKind("invoice_past_due", Text("invoice past due"), _BILLING)
KEY_EXPIRES = NotificationKind("key_expires", Text("API key expires within 7 days"), _TECHNICAL, is_emailed=True)
WEBHOOK_FAILING = NotificationKind(
    "webhook_failing", Text("webhook endpoint failing or disabled"), frozenset({"owner", "admin"}), is_emailed=True
)
EXPERIMENT_STOPPED = NotificationKind("experiment_stopped", Text("experiment stopped"), _TECHNICAL)
POLICY_PUBLISHED = NotificationKind("policy_published", Text("routing policy published by someone else"), _TECHNICAL)
PRICE_DRAFT = NotificationKind("price_draft", Text("draft price version waits for approval"), frozenset())
NOTIFICATION_KINDS: Mapping[str, NotificationKind] = {
    kind.name: kind for kind in tuple(globals().values()) if isinstance(kind, NotificationKind)
}


def kinds_of(role: str | None) -> list[NotificationKind]:
    """Return the kinds that members with the role see; those for operators if it is None."""
    return [
        kind for kind in NOTIFICATION_KINDS.values() if (kind.is_for_operators if role is None else role in kind.roles)
    ]
