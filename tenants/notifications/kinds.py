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


NOTIFICATION_KINDS: dict[str, NotificationKind] = {}


def _declare(name: str, label: Text, roles: frozenset[str], *, is_emailed: bool = False) -> NotificationKind:
    """Create a kind and add it to `NOTIFICATION_KINDS`."""
    kind = NOTIFICATION_KINDS[name] = NotificationKind(name, label, roles, is_emailed)
    return kind


_BILLING = frozenset({"owner", "admin", "billing"})
_TECHNICAL = frozenset({"owner", "admin", "developer"})
BUDGET_THRESHOLD = _declare(
    "budget_threshold", Text("budget usage or forecast passed a threshold"), _BILLING, is_emailed=True
)
INVOICE_ISSUED = _declare("invoice_issued", Text("invoice or credit note issued"), _BILLING)
INVOICE_PAST_DUE = _declare("invoice_past_due", Text("invoice past due"), _BILLING)
KEY_EXPIRES = _declare("key_expires", Text("API key expires within 7 days"), _TECHNICAL, is_emailed=True)
WEBHOOK_FAILING = _declare(
    "webhook_failing", Text("webhook endpoint failing or disabled"), frozenset({"owner", "admin"}), is_emailed=True
)
EXPERIMENT_STOPPED = _declare("experiment_stopped", Text("experiment stopped"), _TECHNICAL)
POLICY_PUBLISHED = _declare("policy_published", Text("routing policy published by someone else"), _TECHNICAL)
PRICE_DRAFT = _declare("price_draft", Text("draft price version waits for approval"), frozenset())


def kinds_of(role: str | None) -> list[NotificationKind]:
    """Return the kinds that members with the role see; those for operators if it is None."""
    return [
        kind for kind in NOTIFICATION_KINDS.values() if (kind.is_for_operators if role is None else role in kind.roles)
    ]
