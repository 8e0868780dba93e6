"""Successful requests of a tenant and their cost, by group.

What counts as successful is described in docs/reference/requests.md, and `millrace.apps.experiments.success` decides it
for single requests. The cost is that of all requests of the group, so cost per success includes failed attempts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Literal, get_args

from billing.metering.usage import TooManyRows
from millrace.apps.request_log.models import CacheLayer
from millrace.apps.request_log.request_rollups import RequestFilters, request_sums

SuccessGroup = Literal["model", "policy", "cache_layer", "key", "end_user"]
SUCCESS_GROUPS: tuple[SuccessGroup, ...] = get_args(SuccessGroup)
MAX_GROUPS = 10_000
_COLUMNS: dict[SuccessGroup, str] = {
    "model": "served_model",
    "policy": "policy",
    "cache_layer": "cache_layer",
    "key": "key_id",
    "end_user": "end_user",
}


@dataclass(frozen=True)
class SuccessCosts:
    """The requests of a group. A request can have several signs of failure."""

    name: str = ""
    requests: int = 0
    succeeded: int = 0
    feedback: int = 0  # requests with feedback that reports success or a score
    bad_feedback: int = 0
    schema_failures: int = 0
    tool_failures: int = 0
    retried: int = 0  # the end user sent the same prompt again
    cancelled: int = 0
    errors: int = 0
    cost_femto: int = 0

    @property
    def success_rate(self) -> float | None:
        return self.succeeded / self.requests if self.requests else None

    @property
    def cost_per_success_femto(self) -> int | None:
        """Return the cost of all requests divided by the successful ones, rounded up; None without a success."""
        return -(-self.cost_femto // self.succeeded) if self.succeeded else None


_COUNTS = tuple(field.name for field in fields(SuccessCosts) if field.name != "name")


def success_costs(
    tenant_id: int,
    start: datetime,
    end: datetime,
    group: SuccessGroup,
    *,
    model: str | None = None,
    key_id: int | None = None,
    project_id: int | None = None,
) -> list[SuccessCosts]:
    """Return the groups with the highest cost first. The tenant's scope must be open.

    Args:
        model: only requests that this model served.

    Raises:
        TooManyRows: there are more than `MAX_GROUPS` groups.
    """
    filters = RequestFilters(model, key_id, project_id)
    found: dict[str, SuccessCosts] = {}
    for (value,), sums in request_sums(tenant_id, start, end, (_COLUMNS[group],), _COUNTS, filters).items():
        # A prompt that was partly in CPU memory was served by the prefix cache.
        name = CacheLayer.PREFIX.value if value == CacheLayer.HOST_MEMORY else str(value)
        if sums["requests"]:
            row = SuccessCosts(name, **sums)
            found[name] = replace(total_success_costs([found[name], row]), name=name) if name in found else row
    if len(found) > MAX_GROUPS:
        raise TooManyRows
    return sorted(found.values(), key=lambda row: (-row.cost_femto, -row.requests, row.name))


def total_success_costs(rows: list[SuccessCosts]) -> SuccessCosts:
    """Return the sum of all groups."""
    return SuccessCosts("", **{name: sum(getattr(row, name) for row in rows) for name in _COUNTS})
