"""Steps of a reservation and of a hit of the answer cache, at which tests kill a gateway."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from billing.reservations.budget_leases import BudgetLeaseStore
from millrace.gateway.admission.budget_admission import BudgetAdmission
from millrace.gateway.admission.early_release import EarlyReleases
from millrace.gateway.answer_cache.answer_store import AnswerStore
from millrace.gateway.answer_cache.semantic_cache import SemanticCache
from millrace.gateway.answer_cache.semantic_store import SemanticStore
from millrace.gateway.dispatch.dispatcher import Dispatcher

# Step -> the patched function, and whether the process dies before or after the call.
STEPS: dict[str, tuple[type, str, str]] = {
    "periods opened": (BudgetLeaseStore, "open_budget_periods", "after"),
    "lease requested": (BudgetLeaseStore, "lease", "before"),
    "lease granted": (BudgetLeaseStore, "lease", "after"),
    "reserved": (BudgetAdmission, "take", "after"),
    "dispatching": (Dispatcher, "_write", "before"),
    "dispatched": (Dispatcher, "_write", "after"),
    "ended": (EarlyReleases, "end", "before"),
    "recalled": (BudgetAdmission, "_handle_revocation", "before"),
    "returning": (BudgetLeaseStore, "return_leases", "before"),
    "returned": (BudgetLeaseStore, "return_leases", "after"),
    "releasing": (BudgetLeaseStore, "release_unused", "before"),
    "released": (BudgetLeaseStore, "release_unused", "after"),
}

# Steps of a hit of the answer cache. Its usage is recorded from `hit recorded` on.
HIT_STEPS: dict[str, tuple[type, str, str]] = {
    "hit reserved": (BudgetAdmission, "take", "after"),
    "hit searched": (AnswerStore, "find", "before"),
    "hit found": (AnswerStore, "find", "after"),
    "hit recording": (Dispatcher, "record_hit", "before"),
    "hit recorded": (Dispatcher, "record_hit", "after"),
    "hit ended": (EarlyReleases, "end", "before"),
}

# Steps of a hit of the semantic cache. Its usage is recorded from `hit recorded` on.
SEMANTIC_STEPS: dict[str, tuple[type, str, str]] = {
    "vector reserved": (BudgetAdmission, "take", "after"),
    "questions searched": (SemanticStore, "read_scope", "before"),
    "question read": (SemanticStore, "read_entry", "after"),
    "answer chosen": (SemanticCache, "find", "after"),
    "hit recording": (Dispatcher, "record_hit", "before"),
    "hit recorded": (Dispatcher, "record_hit", "after"),
}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(step: str) -> None:
    """Let this process die at the step."""
    owner, name, when = (STEPS | HIT_STEPS | SEMANTIC_STEPS)[step]
    real: Callable[..., Awaitable[Any]] = getattr(owner, name)

    @wraps(real)
    async def deadly(*given: Any, **more: Any) -> Any:
        if when == "before":
            die()
        await real(*given, **more)
        die()

    setattr(owner, name, deadly)
