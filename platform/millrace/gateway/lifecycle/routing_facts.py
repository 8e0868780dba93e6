"""The properties of a request that its route depends on."""

from __future__ import annotations

from datetime import UTC, datetime

from millrace.gateway.admission.budget_admission import TIERS
from millrace.gateway.admission.budget_shares import BudgetShares
from millrace.gateway.core.types import InferenceRequest, Prompt
from millrace.gateway.protocols.question import question_of
from millrace.gateway.protocols.upstreams.images import has_images
from millrace.gateway.routing.signals import RequestSize
from tenants.keys.snapshot import ApiKeySnapshot
from tenants.routing_policies.complexity import score
from tenants.routing_policies.policy import RoutingFacts

TASK = "task"  # the metadata field with the task label, if the header is not set
MAX_TASK_LENGTH = 64


def task_of(request: InferenceRequest) -> str:
    """Return the task label of a request."""
    return (request.task or request.metadata.get(TASK, ""))[:MAX_TASK_LENGTH]


async def routing_facts(
    key: ApiKeySnapshot, request: InferenceRequest, request_id: str, prompt: Prompt, shares: BudgetShares | None
) -> RoutingFacts:
    """Return the facts of a request. The share of its budget is read only if a rule depends on it."""
    policy = key.policies.get(request.model)
    budget_left = None
    if policy is not None and policy.uses_budget and shares is not None:
        budget_left = await shares.percent_left(key)
    complexity = None
    if policy is not None and policy.complexity is not None and (text := question_of(request)):
        complexity = score(policy.complexity, text)
    return RoutingFacts(
        request_id,
        key.key_id,
        prompt.expected_tokens,
        bool(request.tools),
        request.structured is not None,
        datetime.now(UTC),
        has_images(request),
        task_of(request),
        request.metadata,
        key.project_id,
        budget_left,
        complexity,
    )


def request_size(key: ApiKeySnapshot, request: InferenceRequest, prompt: Prompt, facts: RoutingFacts) -> RequestSize:
    """Return what the cost and the fit of a target depend on."""
    tier = TIERS[request.service_class]
    at = round(facts.at.timestamp() * 1e6)
    return RequestSize(key.tenant_id, prompt.expected_tokens, request.max_tokens, facts.images, tier, at)
