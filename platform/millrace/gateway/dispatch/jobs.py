"""The job message of an execution, built from the admitted request."""

from __future__ import annotations

import dataclasses
import hmac

from inference_worker.contract.messages import InferenceJob
from millrace.gateway.admission.admission import AdmittedRequest
from millrace.gateway.core.catalog import ServedModel
from millrace.gateway.protocols import tools


class InferenceJobBuilder:
    def __init__(self, gateway_id: str, prefix_cache_secret: str, request_seconds: int) -> None:
        self._gateway_id = gateway_id
        self._prefix_cache_secret = prefix_cache_secret.encode()
        self._request_seconds = request_seconds

    def make(self, admitted: AdmittedRequest) -> InferenceJob:
        """Return the job of an execution."""
        demand, billing_context = admitted.demand, admitted.billing_context
        request, prompt = demand.request, demand.prompt
        return InferenceJob(
            billing_context=billing_context,
            gateway_id=self._gateway_id,
            prompt_token_ids=prompt.ids,
            params=dataclasses.replace(request.sampling, max_tokens=admitted.max_tokens),
            cache_salt=self._cache_salt(billing_context.tenant_id, demand.model, request.cache_key),
            deadline=demand.admitted_at / 1e6 + self._request_seconds,
            weight=demand.key.weight,
            service_class=request.service_class,
            priority=request.priority,
            breakpoints=prompt.breakpoints,
            input_lengths=prompt.input_lengths,
            second_starts=prompt.second_starts,
            structured=tools.spec(request, demand.model.tokenizer.tool_format if request.tools else None),
            reasoning=prompt.reasoning,
            version=demand.model.version,
        )

    def _cache_salt(self, tenant_id: int, model: ServedModel, cache_key: str | None) -> bytes:
        """Derive the cache salt from a secret, so that no tenant can hit or forge another tenant's cached prefixes.

        It depends on the weights, so that pinned prefixes of other weights are not billed as cache reads.
        """
        name = "\0".join((str(tenant_id), model.name, *model.weights, cache_key or "")).encode()
        return hmac.digest(self._prefix_cache_secret, name, "sha256")[:16]
