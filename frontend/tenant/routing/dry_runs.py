"""What a policy would have done with requests that came lately."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from frontend.core.page_context import PageContext
from millrace.apps.request_log.models import RequestRecord
from tenants.routing_policies.policy import Decision, Policy, RoutingFacts, decide

DAYS = 7
MOST = 500  # requests that are tried
SHOWN = 12
ALL = "*"  # of every model
UNKNOWN = "Unknown"


@dataclass(frozen=True)
class Share:
    """A target, and how many of the requests went or would go there first."""

    model: str
    was: int
    would: int
    of: int


@dataclass(frozen=True)
class Moved:
    """One request that would go elsewhere."""

    request_id: str
    url: str
    at: datetime
    prompt_tokens: int
    was: str
    would: str
    rule: str


@dataclass(frozen=True)
class Trial:
    requests: int
    moved: int
    undecided: int  # whether they brought tools or a schema is not written down
    homeless: int  # no rule would hold: 404
    shares: tuple[Share, ...]
    rows: tuple[Moved, ...]
    every: bool  # requests for any model were tried, not only for this name


@dataclass(frozen=True)
class _Tried:
    record: RequestRecord
    was: str
    would: str
    rule: str


def try_on(visit: PageContext, policy: Policy, name: str) -> Trial:
    """Return the newest requests of the last days, decided again. In the visit's scope.

    Of requests for `name`, or of all if the address asks so. The draw is by the request's id, as it was.
    """
    every = visit.request.POST.get("of", visit.query.get("of", "")) == ALL
    rows = RequestRecord.objects.for_tenant(visit.tenant).filter(
        started_at__gte=visit.now - timedelta(days=DAYS), prompt_tokens__isnull=False
    )
    if not every:
        rows = rows.filter(requested_model=name)
    tried = [_try(row, policy) for row in rows.order_by("-started_at")[:MOST]]
    moved = [one for one in tried if one.was != one.would]
    return Trial(
        requests=len(tried),
        moved=len(moved),
        undecided=sum(one.would == UNKNOWN for one in tried),
        homeless=sum(one.would == "" for one in tried),
        shares=_shares(tried),
        rows=tuple(_moved(visit, one) for one in moved[:SHOWN]),
        every=every,
    )


def _try(record: RequestRecord, policy: Policy) -> _Tried:
    """Whether it brought tools or wanted a schema is in no record: if that matters, where it goes is unknown."""
    found = {_decided(record, policy, tools, schema) for tools in (False, True) for schema in (False, True)}
    targets = record.route.get("targets") or [record.served_model]
    if len(found) > 1:
        return _Tried(record, targets[0], UNKNOWN, "")
    (decision,) = found
    if decision is None:
        return _Tried(record, targets[0], "", "")
    return _Tried(record, targets[0], decision.models[0], str(decision.rule + 1))


def _decided(record: RequestRecord, policy: Policy, tools: bool, schema: bool) -> Decision | None:
    tokens = record.prompt_tokens or 0
    return decide(policy, RoutingFacts(record.request_id, record.key_id, tokens, tools, schema, record.started_at))


def _shares(tried: Iterable[_Tried]) -> tuple[Share, ...]:
    tried = list(tried)
    was, would = Counter(one.was for one in tried), Counter(one.would for one in tried)
    models = sorted({*was, *would} - {""}, key=lambda model: (-would[model], -was[model], model))
    return tuple(Share(model, was[model], would[model], len(tried)) for model in models)


def _moved(visit: PageContext, one: _Tried) -> Moved:
    record = one.record
    return Moved(
        request_id=record.request_id,
        url=visit.link("requests-detail", record.request_id),
        at=record.started_at,
        prompt_tokens=record.prompt_tokens or 0,
        was=one.was,
        would=one.would,
        rule=one.rule,
    )
