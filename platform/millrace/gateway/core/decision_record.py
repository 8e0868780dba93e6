"""The decision record of a request: what the gateway has decided about it, and why.

It is stored in Valkey as JSON, and in part in the request log. Fields that were not set are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

NOT_SERVED = "not served here"  # why a model of a route was skipped


class DecisionRecord(msgspec.Struct, kw_only=True):
    """The decision record of a request or of a side execution. Its JSON has the fields in this order."""

    tenant: int | UnsetType = UNSET
    project: int | UnsetType = UNSET
    requested_model: str | UnsetType = UNSET
    decided_at: str | UnsetType = UNSET
    facts: dict[str, Any] | UnsetType = UNSET  # properties that rules depend on
    policy: dict[str, Any] | UnsetType = UNSET  # version, rule, and what the targets were ordered by
    targets: list[str] | UnsetType = UNSET  # in the order of attempts
    prompt_tokens: int | UnsetType = UNSET
    classifier: str | UnsetType = UNSET  # fingerprint of the classifier of complexity
    skipped: list[dict[str, str]] | UnsetType = UNSET  # models that did not run the request, and the reasons
    experiment: dict[str, Any] | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET  # set by the client
    user: str | UnsetType = UNSET  # the client's end user
    dropped_messages: int | UnsetType = UNSET
    not_summarizing: str | UnsetType = UNSET
    not_escalating: str | UnsetType = UNSET
    sampling_defaults: dict[str, Any] | UnsetType = UNSET  # sampling parameters that the deployment has set
    truncated_inputs: int | UnsetType = UNSET
    answer_cache: dict[str, Any] | UnsetType = UNSET
    summary: dict[str, Any] | UnsetType = UNSET
    executions: list[dict[str, Any]] | UnsetType = UNSET  # placements of executions on replicas
    retry_budget: str | UnsetType = UNSET  # why there was no fallback
    shadow: dict[str, str] | UnsetType = UNSET
    not_shadowing: str | UnsetType = UNSET
    escalations: list[dict[str, str]] | UnsetType = UNSET  # answers that failed a check
    checks: str | UnsetType = UNSET  # ID of the request whose semantic hit a check checks
    shadow_of: str | UnsetType = UNSET  # ID of the request that a shadow belongs to

    @property
    def policy_version(self) -> int:
        """Return the version of the request's routing policy; 0 without one."""
        return 0 if self.policy is UNSET else int(self.policy.get("version", 0))

    @property
    def placements(self) -> list[dict[str, Any]]:
        """Return the placements of the request's executions on replicas."""
        return [] if self.executions is UNSET else self.executions

    def skip(self, model: str, reason: str) -> None:
        """Record why a model did not run the request."""
        skipped = {"model": model, "reason": reason}
        self.skipped = [skipped] if self.skipped is UNSET else [*self.skipped, skipped]

    def skip_first(self, model: str, reason: str) -> None:
        """Record why a model that comes before all others did not run the request."""
        self.skipped = [{"model": model, "reason": reason}, *(() if self.skipped is UNSET else self.skipped)]

    def place(self, placement: dict[str, Any]) -> None:
        """Record the placement of an execution on a replica."""
        self.executions = [*self.placements, placement]

    def escalate(self, escalation: dict[str, str]) -> None:
        """Record that an answer has failed a check. The entry may be extended later."""
        self.escalations = [escalation] if self.escalations is UNSET else [*self.escalations, escalation]

    def select(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the fields of these names that are set."""
        return {name: value for name in names if (value := getattr(self, name)) is not UNSET}
