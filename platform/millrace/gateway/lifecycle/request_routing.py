"""The routing of a request: its prompt, its facts, its route, and the targets that are tried."""

from __future__ import annotations

from millrace.gateway.admission.budget_shares import BudgetShares
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.core.errors import ApiError
from millrace.gateway.core.types import InferenceRequest, Prompt, ResponseSpec, Writer
from millrace.gateway.lifecycle.routing_facts import request_size, routing_facts
from millrace.gateway.lifecycle.tokenizer import PromptTokenizer
from millrace.gateway.protocols.upstreams.images import has_images
from millrace.gateway.protocols.writers import make_writer
from millrace.gateway.routing.retry_budgets import RetryBudgets
from millrace.gateway.routing.router import Route, Router
from tenants.keys.snapshot import ApiKeySnapshot


class RequestRouting:
    """The routing of one gateway's requests."""

    def __init__(self, router: Router, tokenizer: PromptTokenizer, budget_shares: BudgetShares | None = None) -> None:
        self.router = router
        self.tokenizer = tokenizer
        self.retry_budgets = RetryBudgets()
        self._budget_shares = budget_shares

    def measure(self, key: ApiKeySnapshot, request: InferenceRequest) -> ServedModel:
        """Return the deployment whose tokenizer counts the prompt before the request is routed.

        Raises:
            ApiError: the key may not use the model.
        """
        return self.router.measure(key, request.model, has_images=has_images(request))

    async def route(self, key: ApiKeySnapshot, request: InferenceRequest, request_id: str, prompt: Prompt) -> Route:
        """Return the route of a request.

        Raises:
            ApiError: 404, no deployment can run it.
        """
        facts = await routing_facts(key, request, request_id, prompt, self._budget_shares)
        route = self.router.route(key, request.model, facts, request_size(key, request, prompt, facts))
        if route.policy is not None:
            self.retry_budgets.record_request((key.tenant_id, request.model))
        if request.metadata:
            route.decision_record.metadata = request.metadata
        if request.user:
            route.decision_record.user = request.user
        return route

    def find_current(self, candidate: ServedModel) -> ServedModel:
        """Return the current version of a deployment; a deployment that was removed meanwhile is returned itself."""
        return self.router.find_served(candidate.name) or candidate

    def make_writer(self, response_spec: ResponseSpec) -> Writer:
        """Return a writer for a response that is resumed.

        Raises:
            ApiError: 404, its model is no longer served.
        """
        model = self.router.find_served(response_spec.model)
        if model is None:
            raise ApiError("not_found", f"The model {response_spec.model!r} of this request is no longer served.")
        return make_writer(response_spec, model.tokenizer)
