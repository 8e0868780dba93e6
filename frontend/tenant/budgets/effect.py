"""The text that reports where a change of a budget has taken effect."""

from __future__ import annotations

from django.utils.translation import gettext as _

from billing.models import Budget


def effect_of(budget: Budget) -> str:
    """Return a sentence about the gateways that have not applied the budget's last change."""
    pending = budget.pending_gateways
    if pending is None:
        return _("The change takes effect in every gateway within a second.")
    if not pending:
        return _("The change has taken effect in every gateway.")
    named = ", ".join(pending)
    return _("The change has not taken effect in these gateways yet, because they do not respond: %(named)s.") % {
        "named": named
    }
