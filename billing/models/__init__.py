"""What was used, what it costs, and what is owed."""

from billing.models.usage import MOST_TOKENS, TOKEN_CLASSES, UsageEvent, UsageQuarantine, Verdict

__all__ = [
    "MOST_TOKENS",
    "TOKEN_CLASSES",
    "UsageEvent",
    "UsageQuarantine",
    "Verdict",
]
