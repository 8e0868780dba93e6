"""Dry run of a routing policy: the target that each recent request would have taken, and what it would have cost.

Each request is decided again by the properties that its gateway recorded. No model is called: a request keeps its
tokens, and is priced by the rate card of the other target. Loads of replicas are not recorded, so the strategy
`least_busy` uses the order of the rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from statistics import fmean, median, quantiles

from django.db.models import Q
from django.utils import timezone

from billing.currencies.amounts import whole_units
from billing.models import CompiledRateCard
from billing.rates.pricing import PriceIndex, Tier, UnknownPriceError, price
from inference_worker.contract.request import TOKEN_CLASSES, TokenCounts
from millrace.apps.request_log import selectors
from millrace.apps.request_log.models import RequestRecord
from millrace.apps.request_log.selectors import Usage
from millrace.apps.request_log.success_costs import SuccessCosts, success_costs
from tenants.routing_policies.policy import Decision, Policy, RoutingFacts, decide
from tenants.routing_policies.strategies import TargetMeasures
from tenants.routing_policies.target_checks import ModelObstacle, find_obstacles

DAYS = 7
MAX_REQUESTS = 2000
DEFAULT_REQUESTS = 500
LATENCY_HOURS = 24
MAX_LATENCIES = 5000  # measurements of the last hours
_FLAGS = ("tools", "schema", "images")
_REJECTING = (ModelObstacle.UNKNOWN, ModelObstacle.UNPRICED)
MAX_OUTPUT = 1024  # tokens of a request without a recorded maximum


@dataclass(frozen=True)
class DryDecision:
    """A request with the target it went to first, and the one it would go to."""

    record: RequestRecord
    was: str
    would: str  # empty: no rule matches
    rule: int | None
    rejected: ModelObstacle | None = None  # why the first target would reject the request


@dataclass
class PolicyDryRun:
    """The result of a dry run."""

    decisions: list[DryDecision] = field(default_factory=list)
    rules: Counter[int] = field(default_factory=Counter)  # rule -> number of requests
    moves: Counter[tuple[str, str]] = field(default_factory=Counter)  # (from, to) -> number of requests
    undecided: int = 0  # depends on properties that were not recorded
    unmatched: int = 0  # no rule matches: 404
    # (first target, reason) -> number of requests that would be rejected
    rejected: Counter[tuple[str, ModelObstacle]] = field(default_factory=Counter)
    priced: int = 0  # requests whose cost is known for both targets
    cost_femto: int = 0  # cost of the priced requests
    new_cost_femto: int = 0
    ttft_ms: tuple[int, int] | None = None  # median and 95th percentile of the requests
    new_ttft_ms: tuple[int, int] | None = None  # estimated: the median of the new target for requests that move
    success_rate: float | None = None  # expected by the rates of the models, before and after
    new_success_rate: float | None = None

    @property
    def requests(self) -> int:
        return len(self.decisions) + self.undecided

    @property
    def moved(self) -> list[DryDecision]:
        return [decision for decision in self.decisions if decision.was != decision.would]

    @property
    def shares(self) -> list[tuple[str, int, int]]:
        """Return each target with the number of requests that went and would go to it first."""
        was = Counter(decision.was for decision in self.decisions)
        would = Counter(decision.would for decision in self.decisions)
        models = sorted({*was, *would} - {""}, key=lambda model: (-would[model], -was[model], model))
        return [(model, was[model], would[model]) for model in models]


def dry_run(
    tenant_id: int,
    policy: Policy,
    name: str | None,
    max_requests: int = DEFAULT_REQUESTS,
    obstacles: Mapping[str, ModelObstacle] | None = None,
) -> PolicyDryRun:
    """Decide the newest requests of the last days again. The tenant's scope must be open.

    Args:
        name: the requested model; None: requests of all models.
        obstacles: those of the policy's models, if they are known.
    """
    now = timezone.now()
    rows = RequestRecord.objects.for_tenant(tenant_id).filter(
        started_at__gte=now - timedelta(days=DAYS), prompt_tokens__isnull=False
    )
    if name is not None:
        rows = rows.filter(requested_model=name)
    records = list(rows.order_by("-started_at")[:max_requests])
    run = PolicyDryRun()
    if not records:
        return run
    index = _prices(tenant_id, {*policy.models, *(_first_target(record) for record in records)})
    latencies = _latencies(tenant_id)
    if obstacles is None:
        obstacles = find_obstacles(tenant_id, policy.models)
    for record in records:
        found = _decide(policy, record, index, latencies)
        if len(found) != 1:
            run.undecided += 1
            continue
        (decision,) = found
        would, rule, rejected = ("", None, None) if decision is None else _first_served(decision, obstacles)
        if rejected is not None:
            run.rejected[would, rejected] += 1
        run.decisions.append(DryDecision(record, _first_target(record), would, rule, rejected))
        if rule is None:
            run.unmatched += 1
        else:
            run.rules[rule] += 1
        if would != _first_target(record):
            run.moves[_first_target(record), would] += 1
    _add_costs(run, index, selectors.usages(records))
    _add_latencies(run, latencies)
    _add_success_rates(run, success_costs(tenant_id, now - timedelta(days=DAYS), now, "model"))
    return run


def _first_served(decision: Decision, obstacles: Mapping[str, ModelObstacle]) -> tuple[str, int, ModelObstacle | None]:
    """Return the first target of a decision, its rule, and why the request would be rejected; None if it would not.

    As in a gateway, targets without a deployment are skipped, and a first target without a price rejects the request.
    A deployment without replicas may be replaced by a fallback.
    """
    deployed = [model for model in decision.models if obstacles.get(model) != ModelObstacle.UNKNOWN]
    first = deployed[0] if deployed else decision.models[0]
    obstacle = obstacles.get(first)
    return first, decision.rule, obstacle if obstacle in _REJECTING else None


def _first_target(record: RequestRecord) -> str:
    targets = record.route.get("targets") or [record.served_model or record.requested_model]
    return str(targets[0])


def _decide(
    policy: Policy, record: RequestRecord, index: PriceIndex, latencies: Mapping[str, Sequence[int]]
) -> set[Decision | None]:
    """Return the decisions for all values of the properties that were not recorded; none if they could be any."""
    at = round(record.started_at.timestamp() * 1e6)
    tokens = record.prompt_tokens or 0
    counts = TokenCounts(uncached=tokens, output=record.max_tokens or MAX_OUTPUT)

    def measure(model: str) -> TargetMeasures:
        femto = _cost(index, record.tenant_id, model, counts, at)
        ttft = median(latencies[model]) if latencies.get(model) else None
        return TargetMeasures(cost_nano=None if femto is None else whole_units(femto), ttft_ms=ttft)

    recorded = record.route.get("facts")
    facts = recorded if isinstance(recorded, dict) else {}
    metadata = facts.get("metadata", {})
    flags: list[tuple[bool, ...]] = [tuple(bool(facts.get(name)) for name in _FLAGS)]
    if recorded is None:  # the gateway of an earlier release
        flags = list(product((False, True), repeat=len(_FLAGS)))
    if set(policy.metadata_fields) - set(metadata) or (policy.uses_budget and "budget_left" not in facts):
        return set()
    if policy.uses_complexity and record.route.get("classifier") != (
        policy.complexity and policy.complexity.fingerprint
    ):
        return set()  # scored by no classifier or by another one; prompts are not stored with the record
    return {
        decide(
            policy,
            RoutingFacts(
                record.request_id,
                record.key_id,
                tokens,
                tools,
                schema,
                record.started_at,
                images,
                str(facts.get("task", "")),
                {name: value for name, value in metadata.items() if value is not None},
                record.project_id,
                facts.get("budget_left"),
                facts.get("complexity"),
            ),
            measure,
        )
        for tools, schema, images in flags
    }


def _prices(tenant_id: int, models: set[str]) -> PriceIndex:
    index = PriceIndex()
    owners = Q(tenant_id=tenant_id) | Q(tenant_id=None)
    rows = CompiledRateCard.objects.filter(owners, model__in=models).order_by("pk")
    index.add(row.decode() for row in rows)
    return index


def _cost(index: PriceIndex, tenant_id: int, model: str, counts: TokenCounts, at: int) -> int | None:
    rate_card = index.find(tenant_id, model, Tier.STANDARD, at)
    if rate_card is None:
        return None
    try:
        return price(rate_card, counts, at).cost_femto
    except UnknownPriceError:
        return None


def _add_costs(run: PolicyDryRun, index: PriceIndex, usages: Mapping[str, Usage]) -> None:
    """Add the costs of the requests whose tokens are settled. A request that stays keeps its cost."""
    for decision in run.decisions:
        record, usage = decision.record, usages.get(decision.record.request_id)
        if usage is None or not decision.would or decision.rejected:
            continue
        cost: int | None = usage.cost_femto
        if decision.would != decision.was:
            counts = TokenCounts(**{name: max(0, usage.tokens[name]) for name in TOKEN_CLASSES})
            at = round(record.started_at.timestamp() * 1e6)
            cost = _cost(index, record.tenant_id, decision.would, counts, at)
        if cost is not None:
            run.priced += 1
            run.cost_femto += usage.cost_femto
            run.new_cost_femto += cost


def _latencies(tenant_id: int) -> dict[str, list[int]]:
    """Return the recent times to the first token of each model."""
    since = timezone.now() - timedelta(hours=LATENCY_HOURS)
    rows = RequestRecord.objects.for_tenant(tenant_id).filter(started_at__gte=since, ttft_ms__isnull=False)
    found: defaultdict[str, list[int]] = defaultdict(list)
    for model, ttft_ms in rows.order_by("-started_at").values_list("served_model", "ttft_ms")[:MAX_LATENCIES]:
        if ttft_ms is not None:
            found[model].append(ttft_ms)
    return dict(found)


def _add_latencies(run: PolicyDryRun, latencies: Mapping[str, Sequence[int]]) -> None:
    old: list[float] = []
    new: list[float] = []
    for decision in run.decisions:
        ttft_ms = decision.record.ttft_ms
        if ttft_ms is None or decision.rejected:
            continue
        if decision.would == decision.was:
            new.append(ttft_ms)
        elif latencies.get(decision.would):
            new.append(median(latencies[decision.would]))
        else:
            continue
        old.append(ttft_ms)
    run.ttft_ms, run.new_ttft_ms = _summary(old), _summary(new)


def _add_success_rates(run: PolicyDryRun, models: Sequence[SuccessCosts]) -> None:
    """Add the expected success rates of the requests whose targets have a success rate, before and after."""
    rates = {row.name: row.success_rate for row in models if row.success_rate is not None}
    pairs = [
        (rates[decision.was], rates[decision.would])
        for decision in run.decisions
        if decision.was in rates and decision.would in rates
    ]
    if pairs:
        run.success_rate, run.new_success_rate = (fmean(values) for values in zip(*pairs, strict=True))


def _summary(values: Sequence[float]) -> tuple[int, int] | None:
    if len(values) < 2:
        return None
    return round(median(values)), round(quantiles(values, n=20)[-1])
